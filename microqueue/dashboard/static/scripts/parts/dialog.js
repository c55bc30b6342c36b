/* Dialogs: the browser's own <dialog>, which keeps the focus inside and closes on Escape. */

import { h } from "../dom.js";
import { button } from "./pieces.js";

/** What is wrong with fields of a form, or, with an `action`, what to consider before it is done. */
export class FormProblem extends Error {
  /** `notes` name a field by its path, as in `payload.to`; `action` is the button's new label. */
  constructor(notes, action = null) {
    super(notes.map(({ message }) => message).join(" "));
    this.name = "FormProblem";
    this.notes = notes;
    this.action = action;
  }
}

/**
 * Open a dialog with a form; `submit(data, dialog)` performs it, and closes it unless it throws.
 *
 * `fields` is what stands in the form. `data` is the form's FormData. What the server, or a
 * `FormProblem`, says of a field is shown there; the rest below the form.
 */
export function openForm({ title, fields, action, kind = "primary", submit, wide = false }) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const confirm = h("button", { type: "submit", class: `button ${kind}` }, action);
  const form = h(
    "form",
    { method: "dialog", class: "dialog-form" },
    h("h2", {}, title),
    fields,
    problem,
    h(
      "div",
      { class: "dialog-buttons" },
      button("Cancel", () => dialog.close(), { kind: "quiet" }),
      confirm,
    ),
  );
  const dialog = h("dialog", { class: wide ? "dialog wide" : "dialog", "aria-label": title }, form);
  form.onsubmit = async (event) => {
    event.preventDefault();
    if (confirm.disabled) return;
    confirm.disabled = true;
    problem.hidden = true;
    clearNotes(form);
    try {
      await submit(new FormData(form), dialog);
      dialog.close();
    } catch (error) {
      if (error.action) confirm.textContent = error.action;
      const notes = error.notes ?? error.problem?.errors ?? [];
      if (!showNotes(form, notes, { warning: Boolean(error.action) })) {
        problem.textContent = error.message;
        problem.hidden = false;
      }
      confirm.disabled = false;
      form.querySelector("[aria-invalid=true]")?.focus();
    }
  };
  form.oninput = (event) => {
    confirm.textContent = action;
    const noted = event.target.closest("[data-field]");
    if (noted) clearNotes(noted);
  };
  dialog.onclose = () => dialog.remove();
  document.body.append(dialog);
  dialog.showModal();
  return { dialog, form, confirm, problem };
}

/** Ask before something is destroyed; `perform` does it. */
export function confirmFirst({ title, explanation, action, perform }) {
  return openForm({
    title,
    fields: h("p", {}, explanation),
    action,
    kind: "danger",
    submit: perform,
  });
}

/** A labelled field of a form. `path` is what the API calls it: what it says of it is shown here. */
export function field(label, control, hint, path = null) {
  return h(
    "label",
    { class: "field", "data-field": path },
    h("span", { class: "field-label" }, label),
    control,
    hint && h("span", { class: "field-hint" }, hint),
    path && h("span", { class: "field-note", role: "alert", hidden: true }),
  );
}

/** A field for a JSON object; what is wrong with it is shown once it is left. */
export function jsonField(label, name, text, { rows = 8, hint = null } = {}) {
  const box = h("textarea", { name, rows, spellcheck: "false", class: "code-input" }, text);
  const whole = field(label, box, hint, name);
  box.onchange = () => {
    const note = jsonProblem(name, box.value);
    if (note) showNotes(whole, [note]);
  };
  return whole;
}

/** Read JSON objects of a form, by their names; all that is wrong is told at once. */
export function readObjects(data, ...names) {
  const notes = names.map((name) => jsonProblem(name, data.get(name))).filter(Boolean);
  if (notes.length) throw new FormProblem(notes);
  return Object.fromEntries(names.map((name) => [name, JSON.parse(data.get(name) || "{}")]));
}

function jsonProblem(name, text) {
  if (text.trim() === "") return null;
  try {
    const value = JSON.parse(text);
    if (value !== null && typeof value === "object" && !Array.isArray(value)) return null;
    return { path: name, message: "Write an object: { … }" };
  } catch (error) {
    return { path: name, message: `This is not JSON: ${error.message}` };
  }
}

/** Show notes at their fields, within `root`; tells whether each has found its field. */
function showNotes(root, notes, { warning = false } = {}) {
  const fields = [root, ...root.querySelectorAll("[data-field]")];
  const texts = new Map();
  for (const { path, message } of notes) {
    const found = fields.find(
      ({ dataset }) => path === dataset.field || path.startsWith(`${dataset.field}.`),
    );
    if (!found) return false;
    const inside = path.slice(found.dataset.field.length + 1);
    texts.set(found, [...(texts.get(found) ?? []), inside ? `${inside}: ${message}` : message]);
  }
  for (const [found, lines] of texts) {
    const note = found.querySelector(".field-note");
    note.textContent = lines.join("\n");
    note.classList.toggle("is-warning", warning);
    note.hidden = false;
    controlOf(found).setAttribute("aria-invalid", String(!warning));
  }
  return texts.size > 0;
}

function clearNotes(root) {
  for (const note of root.querySelectorAll(".field-note")) note.hidden = true;
  for (const control of root.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
}

function controlOf(whole) {
  return whole.querySelector("input, select, textarea");
}

/** Read a duration of a form: a number and its unit, in seconds; null when it is empty. */
export function readDuration(data, name) {
  const amount = data.get(name);
  if (amount === null || amount === "") return null;
  return Number(amount) * Number(data.get(`${name}_unit`) ?? 1);
}

/** Fields for a duration: an amount and its unit. */
export function durationField(name, { amount = "", unit = 60 } = {}) {
  const units = [
    [1, "seconds"],
    [60, "minutes"],
    [3600, "hours"],
  ];
  return h(
    "span",
    { class: "duration" },
    h("input", {
      type: "number",
      name,
      min: "0",
      step: "any",
      value: amount,
      "aria-label": "Amount",
    }),
    h(
      "select",
      { name: `${name}_unit`, "aria-label": "Unit" },
      units.map(([seconds, label]) =>
        h("option", { value: seconds, selected: seconds === unit }, label),
      ),
    ),
  );
}
