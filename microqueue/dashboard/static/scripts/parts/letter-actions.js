/* What can be done with the selected dead letters: replay, discard, export. */

import { h } from "../dom.js";
import { count, number } from "../format.js";
import { durationField, field, openForm, readDuration } from "./dialog.js";
import { button } from "./pieces.js";
import { saveAs, saveText } from "./download.js";

const FILE_NAME = "dead-letters.jsonl";
const AT_ONCE = 5;

/** The bar above the letters. `view` has `app`, `filter`, `selection` and `data`. */
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
    h("span", { class: "selected", role: "status" }, describe(view)),
    !selection.everything &&
      button(everythingLabel(view), () => selectEverything(view), {
        kind: "quiet",
        key: "everything",
      }),
    !selection.empty && button("Clear", () => clear(view), { kind: "quiet", key: "clear" }),
    h(
      "div",
      { class: "actions" },
      button(selection.empty ? "Export all" : "Export", () => exportLetters(view), {
        key: "export",
      }),
      app.mayAct &&
        button("Discard…", () => askToDiscard(view), {
          kind: "danger",
          disabled: selection.empty,
          key: "discard",
        }),
      app.mayAct &&
        button("Replay…", () => askToReplay(view), {
          kind: "primary",
          disabled: selection.empty,
          key: "replay",
        }),
    ),
  );
}

function describe({ selection, data, filter }) {
  if (selection.everything)
    return `Everything that matches is selected${matches(data, filter) ? `: ${matches(data, filter)}` : ""}`;
  return selection.empty ? "Nothing selected" : `${number(selection.size)} selected`;
}

function everythingLabel({ data, filter }) {
  const known = matches(data, filter);
  return known ? `Select all ${known} that match` : "Select everything that matches";
}

/** How many letters the filter matches, as text; empty while it is not known. */
function matches({ groups }, filter) {
  if (groups.truncated) return "";
  if (!filter.grouped) return number(groups.total);
  const chosen = groups.groups.find((group) => filter.isChosen(group));
  return chosen ? number(chosen.count) : "";
}

function selectEverything(view) {
  view.selection.all(new Date(view.app.clock.now()).toISOString());
  view.app.draw();
}

function clear(view) {
  view.selection.clear();
  view.app.draw();
}

/** The selection as the API wants it. */
function chosen({ selection, filter }) {
  if (!selection.everything) return { ...filter.scope, ids: selection.ids };
  return { ...filter.scope, filter: filter.everything(selection.since) };
}

async function askToReplay(view) {
  const { app } = view;
  const which = chosen(view);
  const found = await dryRun(app, "replay", which);
  if (!found) return;
  openForm({
    title: `Replay ${count(found.matched, "dead letter")} of ${view.filter.place}?`,
    action: `Replay ${number(found.matched)}`,
    fields: [
      h(
        "p",
        { class: "dry-run" },
        `A dry run matched ${count(found.matched, "letter")}. What is replayed waits again, the oldest failure first.`,
      ),
      h(
        "fieldset",
        { class: "choices" },
        h("legend", {}, "When"),
        choice("now", "At once", null, { checked: true }),
        choice("delay", "All of them later, after", durationField("delay", { amount: 10 })),
        choice("spread", "One by one, spread evenly over", durationField("spread", { amount: 10 })),
      ),
      field(
        "Attempts",
        h(
          "span",
          { class: "check" },
          h("input", { type: "checkbox", name: "reset_attempts", checked: true }),
          " count anew",
        ),
      ),
    ],
    submit: async (data) => {
      const when = data.get("when");
      await app.act(
        () =>
          app.api.post("dead-letters/replay", {
            ...which,
            delay_sec: when === "delay" ? readDuration(data, "delay") : 0,
            spread_sec: when === "spread" ? readDuration(data, "spread") : 0,
            reset_attempts: data.get("reset_attempts") !== null,
            dry_run: false,
          }),
        ({ replayed, skipped }) =>
          `${count(replayed, "letter")} replayed${skipped.length ? `, ${number(skipped.length)} skipped: their dedupe key is in use` : ""}.`,
      );
      clear(view);
    },
  });
}

/** A way to replay; whoever fills in its duration has chosen it. */
function choice(value, label, more, attributes = {}) {
  const radio = h("input", { type: "radio", name: "when", value, ...attributes });
  const choose = () => {
    radio.checked = true;
  };
  return h("label", { class: "choice", oninput: choose }, radio, h("span", {}, label), more);
}

async function askToDiscard(view) {
  const { app } = view;
  const which = chosen(view);
  const found = await dryRun(app, "discard", which);
  if (!found) return;
  openForm({
    title: `Discard ${count(found.matched, "dead letter")} of ${view.filter.place}?`,
    action: `Discard ${number(found.matched)} for good`,
    kind: "danger",
    fields: h(
      "p",
      { class: "dry-run" },
      `A dry run matched ${count(found.matched, "letter")}. What is discarded is deleted for good; an export beforehand keeps a copy.`,
    ),
    submit: async () => {
      await app.act(
        () => app.api.post("dead-letters/discard", { ...which, dry_run: false }),
        ({ discarded }) => `${count(discarded, "letter")} discarded.`,
      );
      clear(view);
    },
  });
}

/** Count what an action would meet; what goes wrong is shown, and gives nothing. */
function dryRun(app, verb, which) {
  return app.ask(() => app.api.post(`dead-letters/${verb}`, { ...which, dry_run: true }));
}

/** Save what is selected, or everything that the filter matches, as JSON lines. */
async function exportLetters({ app, filter, selection }) {
  if (selection.size) {
    const lines = await app.ask(() => linesOf(selection.ids, app.api));
    if (lines) saveText(lines, FILE_NAME);
    return;
  }
  const described = selection.everything ? filter.everything(selection.since) : filter.letters();
  saveAs(app.api.address("dead-letters/export", { ...described, queue: filter.queue }), FILE_NAME);
}

/** Read letters a few at a time, and write each as the server's own export does. */
async function linesOf(ids, api) {
  const lines = [];
  for (let start = 0; start < ids.length; start += AT_ONCE) {
    const some = ids.slice(start, start + AT_ONCE);
    const letters = await Promise.all(some.map((id) => api.get(`tasks/${encodeURIComponent(id)}`)));
    for (const { actions: _actions, at: _at, ...letter } of letters)
      lines.push(`${JSON.stringify(letter)}\n`);
  }
  return lines;
}
