/* Dialogs: the browser's own <dialog>, which keeps the focus inside and closes on Escape. */

import { h } from "../dom.js";
import { button } from "./pieces.js";

/**
 * Open a dialog with a form; `submit(data, dialog)` performs it, and closes it unless it throws.
 *
 * `fields` is what stands in the form. `data` is the form's FormData.
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
    try {
      await submit(new FormData(form), dialog);
      dialog.close();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
      confirm.disabled = false;
    }
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

/** A labelled field of a form. */
export function field(label, control, hint) {
  return h(
    "label",
    { class: "field" },
    h("span", { class: "field-label" }, label),
    control,
    hint && h("span", { class: "field-hint" }, hint),
  );
}

/** Read JSON that must be an object, or say where it is wrong. */
export function readPayload(text) {
  let payload;
  try {
    payload = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`, { cause: error });
  }
  if (payload === null || typeof payload !== "object" || Array.isArray(payload))
    throw new Error("A payload is an object: { … }");
  return payload;
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
