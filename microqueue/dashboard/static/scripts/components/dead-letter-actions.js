/* Actions on the selected dead letters: replay, discard, export. */

import { h } from "../dom.js";
import { count, number } from "../format.js";
import { durationField, openForm, readDuration } from "./dialog.js";
import { button } from "./common.js";
import { saveAs, saveText } from "./download.js";

const FILE_NAME = "dead-letters.jsonl";
const PARALLEL_REQUESTS = 5;

/** The toolbar above the table. `view` has `app`, `filter`, `selection` and `data`. */
export function selectionBar(view) {
  const { app, selection } = view;
  return h(
    "div",
    {
      class: selection.empty ? "selection-bar" : "selection-bar is-active",
      key: "selection",
      role: "toolbar",
      "aria-label": "Selection",
    },
    h(
      "span",
      {
        class: "selected",
        role: "status",
        "data-selected": selection.everything ? "all" : selection.size,
      },
      describeSelection(view),
    ),
    !selection.everything &&
      button(selectAllLabel(view), () => selectAll(view), {
        kind: "quiet",
        key: "select-all",
      }),
    !selection.empty &&
      button("Clear", () => clearSelection(view), { kind: "quiet", key: "clear-selection" }),
    h(
      "div",
      { class: "actions" },
      button(selection.empty ? "Export all" : "Export", () => exportDeadLetters(view), {
        key: "export",
      }),
      app.mayAct &&
        button("Discard…", () => openDiscardForm(view), {
          kind: "danger",
          disabled: selection.empty,
          key: "discard",
        }),
      app.mayAct &&
        button("Replay…", () => openReplayForm(view), {
          kind: "primary",
          disabled: selection.empty,
          key: "replay",
        }),
    ),
  );
}

function describeSelection({ selection, data, filter }) {
  if (selection.everything) {
    const total = matchCount(data, filter);
    return total ? `All ${total} matching selected` : "All matching selected";
  }
  return selection.empty ? "None selected" : `${number(selection.size)} selected`;
}

function selectAllLabel({ data, filter }) {
  const total = matchCount(data, filter);
  return total ? `Select all ${total} matching` : "Select all matching";
}

/** The number of dead letters that match, as text; empty if unknown. */
function matchCount({ groups }, filter) {
  if (groups.truncated) return "";
  if (!filter.grouped) return number(groups.total);
  const group = groups.groups.find((one) => filter.isSelected(one));
  return group ? number(group.count) : "";
}

function selectAll(view) {
  view.selection.all(new Date(view.app.clock.now()).toISOString());
  view.app.draw();
}

function clearSelection(view) {
  view.selection.clear();
  view.app.draw();
}

/** The selection as body parameters of an action. */
function selectionBody({ selection, filter }) {
  if (!selection.everything) return { ...filter.scope, ids: selection.ids };
  return { ...filter.scope, filter: filter.everything(selection.since) };
}

async function openReplayForm(view) {
  const { app } = view;
  const selection = selectionBody(view);
  const found = await dryRun(app, "replay", selection);
  if (!found) return;
  openForm({
    title: `Replay ${count(found.matched, "dead letter")} in ${view.filter.scopeLabel}?`,
    action: `Replay ${number(found.matched)}`,
    fields: [
      h(
        "p",
        { class: "dry-run", "data-matched": found.matched },
        `Dry run: ${count(found.matched, "dead letter")} matched. The oldest failures are replayed first.`,
      ),
      h(
        "fieldset",
        { class: "choices" },
        h("legend", {}, "When"),
        choice("now", "Now", null, { checked: true }),
        choice("delay", "After a delay of", durationField("delay", { amount: 10 })),
        choice("spread", "Spread evenly over", durationField("spread", { amount: 10 })),
      ),
      h(
        "label",
        { class: "check" },
        h("input", { type: "checkbox", name: "reset_attempts", checked: true }),
        " Reset attempts",
      ),
    ],
    submit: async (data) => {
      const when = data.get("when");
      await app.act(
        () =>
          app.api.post("dead-letters/replay", {
            ...selection,
            delay_sec: when === "delay" ? readDuration(data, "delay") : 0,
            spread_sec: when === "spread" ? readDuration(data, "spread") : 0,
            reset_attempts: data.get("reset_attempts") !== null,
            dry_run: false,
          }),
        ({ replayed, skipped }) =>
          `${count(replayed, "dead letter")} replayed${skipped.length ? `, ${number(skipped.length)} skipped because their dedupe key is in use` : ""}.`,
      );
      clearSelection(view);
    },
  });
}

/** A radio button for when to replay; entering a duration selects it. */
function choice(value, label, control, attributes = {}) {
  const radio = h("input", { type: "radio", name: "when", value, ...attributes });
  const select = () => {
    radio.checked = true;
  };
  return h("label", { class: "choice", oninput: select }, radio, h("span", {}, label), control);
}

async function openDiscardForm(view) {
  const { app } = view;
  const selection = selectionBody(view);
  const found = await dryRun(app, "discard", selection);
  if (!found) return;
  openForm({
    title: `Discard ${count(found.matched, "dead letter")} in ${view.filter.scopeLabel}?`,
    action: `Discard ${number(found.matched)} permanently`,
    kind: "danger",
    fields: h(
      "p",
      { class: "dry-run", "data-matched": found.matched },
      `Dry run: ${count(found.matched, "dead letter")} matched. Discarded tasks are deleted permanently. Export first to keep a copy.`,
    ),
    submit: async () => {
      await app.act(
        () => app.api.post("dead-letters/discard", { ...selection, dry_run: false }),
        ({ discarded }) => `${count(discarded, "dead letter")} discarded.`,
      );
      clearSelection(view);
    },
  });
}

/** Count what an action would change; null, and a message, if that fails. */
function dryRun(app, verb, selection) {
  return app.requestOrReport(() =>
    app.api.post(`dead-letters/${verb}`, { ...selection, dry_run: true }),
  );
}

/** Download the selection, or everything that matches, as JSON lines. */
async function exportDeadLetters({ app, filter, selection }) {
  if (selection.size) {
    const lines = await app.requestOrReport(() => exportLines(selection.ids, app.api));
    if (lines) saveText(lines, FILE_NAME);
    return;
  }
  const query = selection.everything ? filter.everything(selection.since) : filter.queryForList();
  saveAs(app.api.address("dead-letters/export", { ...query, queue: filter.queue }), FILE_NAME);
}

/** Fetch tasks a few at a time, and write each as the server's export does. */
async function exportLines(ids, api) {
  const lines = [];
  for (let start = 0; start < ids.length; start += PARALLEL_REQUESTS) {
    const some = ids.slice(start, start + PARALLEL_REQUESTS);
    const tasks = await Promise.all(some.map((id) => api.get(`tasks/${encodeURIComponent(id)}`)));
    for (const { actions: _actions, at: _at, ...task } of tasks)
      lines.push(`${JSON.stringify(task)}\n`);
  }
  return lines;
}
