/* Forms in a <dialog>, which traps the focus and closes on Escape. */

import { h } from "../dom.js";
import { number } from "../format.js";
import { button } from "./common.js";

/** Invalid fields of a form; with an `action`, warnings that a second click confirms. */
export class FormError extends Error {
  /** `notes` are `{path, message}`, as in `payload.to`; `action` is the button's new label. */
  constructor(notes, action = null) {
    super(notes.map(({ message }) => message).join(" "));
    this.name = "FormError";
    this.notes = notes;
    this.action = action;
  }
}

/**
 * Open a form in a dialog. `submit(data, dialog)` gets its FormData; unless it throws, the dialog
 * closes.
 *
 * Errors of the server, or of a `FormError`, are shown at the field that they name, else below the
 * form. `dismiss` is the label of the button that closes it; null for none.
 */
export function openForm({
  title,
  fields,
  action,
  kind = "primary",
  submit,
  wide = false,
  dismiss = "Cancel",
}) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const confirm = h(
    "button",
    { type: "submit", class: `button ${kind}`, "data-action": "submit" },
    action,
  );
  const form = h(
    "form",
    { method: "dialog", class: "dialog-form" },
    h("h2", {}, title),
    fields,
    problem,
    h(
      "div",
      { class: "dialog-buttons" },
      dismiss && button(dismiss, () => dialog.close(), { kind: "quiet", key: "dismiss" }),
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
  // A closed part would hide the field that the browser wants to show.
  form.addEventListener("invalid", (event) => reveal(event.target), true);
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

/** Ask for confirmation before `perform`. */
export function confirmAction({ title, explanation, action, perform, dismiss }) {
  return openForm({
    title,
    fields: h("p", {}, explanation),
    action,
    dismiss,
    kind: "danger",
    submit: perform,
  });
}

/** A labelled field. `path` is its name in the API, whose errors about it are shown here. */
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

/** A field for a JSON object, checked when it loses the focus. */
export function jsonField(label, name, text, { rows = 8, hint = null } = {}) {
  const box = h("textarea", { name, rows, spellcheck: "false", class: "code-input" }, text);
  const whole = field(label, box, hint, name);
  box.onchange = () => {
    const note = jsonProblem(name, box.value);
    if (note) showNotes(whole, [note]);
  };
  return whole;
}

/** Parse the JSON fields of a form by name; throws a FormError with all that are invalid. */
export function readObjects(data, ...names) {
  const notes = names.map((name) => jsonProblem(name, data.get(name))).filter(Boolean);
  if (notes.length) throw new FormError(notes);
  return Object.fromEntries(names.map((name) => [name, JSON.parse(data.get(name) || "{}")]));
}

function jsonProblem(name, text) {
  if (text.trim() === "") return null;
  try {
    const value = JSON.parse(text);
    if (value !== null && typeof value === "object" && !Array.isArray(value)) return null;
    return { path: name, message: "Enter a JSON object: { … }" };
  } catch (error) {
    return { path: name, message: `Not valid JSON: ${error.message}` };
  }
}

/** Show notes at their fields within `root`; returns whether there is a field for each. */
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
    reveal(found);
    controlOf(found).setAttribute("aria-invalid", String(!warning));
  }
  return texts.size > 0;
}

/** Open the part of a form that holds an element. */
function reveal(element) {
  const part = element.closest("details");
  if (part) part.open = true;
}

function clearNotes(root) {
  for (const note of root.querySelectorAll(".field-note")) note.hidden = true;
  for (const control of root.querySelectorAll("[aria-invalid]"))
    control.removeAttribute("aria-invalid");
}

function controlOf(whole) {
  return whole.querySelector("input, select, textarea");
}

/** The part of a form with options that few need, closed until it is opened. */
export function moreOptions(...fields) {
  return h(
    "details",
    { class: "more-options" },
    h("summary", {}, "More options"),
    h("div", { class: "more-fields" }, fields),
  );
}

export function textInput(name, attributes = {}) {
  return h("input", { name, autocomplete: "off", ...attributes });
}

/** A select; `options` are pairs of value and label. */
export function selectField(name, options, chosen) {
  return h(
    "select",
    { name },
    options.map(([value, label]) => h("option", { value, selected: value === chosen }, label)),
  );
}

/** A number of a form; null if it is empty. */
export function readNumber(data, name) {
  const text = data.get(name);
  return text === null || text === "" ? null : Number(text);
}

/** A duration of a form in seconds; null if it is empty. */
export function readDuration(data, name) {
  const amount = data.get(name);
  if (amount === null || amount === "") return null;
  return Number(amount) * Number(data.get(`${name}_unit`) ?? 1);
}

/** The fields of new tasks: priority, delay and max attempts. */
export function deliveryFields(app) {
  return [
    field(
      "Priority",
      h("input", { name: "priority", type: "number", min: 0, max: 255, value: 0 }),
      null,
      "priority",
    ),
    field("Delay", durationField("delay"), null, "delay_sec"),
    field(
      "Max attempts",
      h("input", {
        name: "max_attempts",
        type: "number",
        min: 1,
        placeholder: number(app.config.max_attempts),
      }),
      null,
      "max_attempts",
    ),
  ];
}

const UNITS = [
  [1, "seconds"],
  [60, "minutes"],
  [3600, "hours"],
  [86_400, "days"],
];

/** Fields for a duration: an amount and its unit; with `seconds`, in the largest unit that fits. */
export function durationField(name, { seconds = null, amount = "", unit = 60 } = {}) {
  if (seconds !== null) {
    unit = UNITS.findLast(([size]) => seconds >= size && seconds % size === 0)?.[0] ?? 1;
    amount = seconds / unit;
  }
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
      UNITS.map(([size, label]) => h("option", { value: size, selected: size === unit }, label)),
    ),
  );
}
