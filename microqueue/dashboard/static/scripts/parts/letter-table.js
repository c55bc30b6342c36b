/* The dead letters of a page, each with a box to select it. */

import { h } from "../dom.js";
import { brief, number } from "../format.js";
import { agoElement } from "../ticker.js";
import { editAndReplay, selectionId } from "./task-actions.js";
import { button, clipped, errorText, queueLink, taskLink } from "./pieces.js";

/** `view` has the page in `data.page`, the `selection`, and `app`. */
export function lettersTable(view) {
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
          h("th", { class: "tick" }, pageBox(view, order)),
          ["Task", ...(view.filter.queue ? [] : ["Queue"]), "Error", "Attempts", "Failed", ""].map(
            (name) => h("th", { key: name }, name),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        items.map((letter) => row(letter, view, order)),
      ),
    ),
  );
}

function row(letter, view, order) {
  const selected = view.selection.has(selectionId(letter));
  return h(
    "tr",
    { key: letter.reference, "data-row": letter.id, class: selected ? "is-selected" : "" },
    h("td", { class: "tick" }, letterBox(letter, view, order)),
    h(
      "td",
      { "data-label": "Task" },
      taskLink(letter.id, letter.reference),
      letter.name && h("span", { class: "muted name" }, letter.name),
    ),
    !view.filter.queue &&
      h(
        "td",
        { "data-label": "Queue", key: "queue" },
        queueLink(letter.queue, "dead-letters"),
      ),
    h(
      "td",
      { "data-label": "Error", class: "what" },
      letter.error && errorText(letter.error),
      clipped(brief(letter.preview ?? ""), "code preview"),
    ),
    h(
      "td",
      { "data-label": "Attempts", class: "numeric" },
      `${number(letter.attempts)} of ${number(letter.max_attempts)}`,
    ),
    h(
      "td",
      { "data-label": "Failed", class: "when" },
      agoElement(letter.error?.at ?? letter.updated_at),
    ),
    h(
      "td",
      { class: "row-actions" },
      view.app.mayAct &&
        button("Edit…", () => edit(letter, view.app), {
          kind: "quiet",
          "aria-label": `Edit and replay ${letter.id}`,
        }),
    ),
  );
}

function letterBox(letter, view, order) {
  return h("input", {
    type: "checkbox",
    "aria-label": `Select ${letter.id}`,
    ".checked": view.selection.has(selectionId(letter)),
    onclick: (event) => {
      view.selection.toggle(selectionId(letter), {
        on: event.currentTarget.checked,
        range: event.shiftKey,
        order,
      });
      view.app.draw();
    },
  });
}

function pageBox(view, order) {
  const state = view.selection.stateOf(order);
  return h("input", {
    type: "checkbox",
    "aria-label": "Select this page",
    ".checked": state === "all",
    ".indeterminate": state === "some",
    onclick: () => {
      view.selection.page(order, state !== "all");
      view.app.draw();
    },
  });
}

async function edit(letter, app) {
  const task = await app.ask(() => app.api.get(`tasks/${encodeURIComponent(letter.reference)}`));
  if (task) editAndReplay(task, app);
}
