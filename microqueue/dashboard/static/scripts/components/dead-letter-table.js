/* The table of dead letters, each with a checkbox. */

import { h } from "../dom.js";
import { brief, number } from "../format.js";
import { agoElement } from "../ticker.js";
import { editAndReplay, selectionId } from "./task-actions.js";
import { button, clipped, errorText, queueLink, taskLink } from "./common.js";

/** `view` has `app`, `filter`, `selection` and the page in `data.page`. */
export function deadLetterTable(view) {
  const { items } = view.data.page;
  const order = items.map(selectionId);
  return h(
    "div",
    { class: "card scrolls", key: "table" },
    h(
      "table",
      { class: "rows dead" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { class: "tick" }, pageCheckbox(view, order)),
          [
            "Task",
            ...(view.filter.queue ? [] : ["Queue"]),
            "Error / payload",
            "Attempts",
            "Failed",
            "",
          ].map((name) => h("th", { key: name }, name)),
        ),
      ),
      h(
        "tbody",
        {},
        items.map((task) => row(task, view, order)),
      ),
    ),
  );
}

function row(task, view, order) {
  const selected = view.selection.has(selectionId(task));
  return h(
    "tr",
    { key: task.reference, "data-row": task.id, class: selected ? "is-selected" : "" },
    h("td", { class: "tick" }, rowCheckbox(task, view, order)),
    h(
      "td",
      { "data-label": "Task" },
      taskLink(task.id, task.reference),
      task.name && h("span", { class: "muted name" }, task.name),
    ),
    !view.filter.queue &&
      h("td", { "data-label": "Queue", key: "queue" }, queueLink(task.queue, "dead-letters")),
    h(
      "td",
      { "data-label": "Error / payload", class: "what" },
      task.error && errorText(task.error),
      clipped(brief(task.preview ?? ""), "code preview"),
    ),
    h(
      "td",
      { "data-label": "Attempts", class: "numeric" },
      `${number(task.attempts)} of ${number(task.max_attempts)}`,
    ),
    h(
      "td",
      { "data-label": "Failed", class: "when" },
      agoElement(task.error?.at ?? task.updated_at),
    ),
    h(
      "td",
      { class: "row-actions" },
      view.app.mayAct &&
        button("Edit…", () => edit(task, view.app), {
          kind: "quiet",
          key: "edit",
          "aria-label": `Edit and replay ${task.id}`,
        }),
    ),
  );
}

function rowCheckbox(task, view, order) {
  return h("input", {
    type: "checkbox",
    "aria-label": `Select ${task.id}`,
    ".checked": view.selection.has(selectionId(task)),
    onclick: (event) => {
      view.selection.toggle(selectionId(task), {
        on: event.currentTarget.checked,
        range: event.shiftKey,
        order,
      });
      view.app.draw();
    },
  });
}

function pageCheckbox(view, order) {
  const state = view.selection.stateOf(order);
  return h("input", {
    type: "checkbox",
    "aria-label": "Select all on this page",
    ".checked": state === "all",
    ".indeterminate": state === "some",
    onclick: () => {
      view.selection.page(order, state !== "all");
      view.app.draw();
    },
  });
}

async function edit({ reference }, app) {
  const task = await app.requestOrReport(() =>
    app.api.get(`tasks/${encodeURIComponent(reference)}`),
  );
  if (task) editAndReplay(task, app);
}
