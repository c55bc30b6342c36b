/* Tasks by name: what waits and runs, what ended, how often it fails and how long it takes. */

import { fragment, h } from "../dom.js";
import { about, isEstimate, number, percent, short, took } from "../format.js";
import { href } from "../routes.js";
import { empty } from "../components/common.js";
import { filterForm, nameInAddress, queueSelect } from "../components/filter.js";
import { View } from "./view.js";

const PAGE = 100;
const HOUR = 3600;
const PERIODS = [
  [HOUR, "Last hour"],
  [24 * HOUR, "Last day"],
  [7 * 24 * HOUR, "Last week"],
];
const COUNTS = [
  { field: "waiting", label: "Waiting", view: "tasks", status: "pending" },
  { field: "running", label: "Running", view: "tasks", status: "processing" },
  { field: "done", label: "Done", view: "tasks", status: "done" },
  { field: "failed", label: "Failed", view: "dead-letters" },
];
const TIMES = [
  { field: "wait_p50", label: "Wait p50" },
  { field: "wait_p95", label: "Wait p95" },
  { field: "run_p50", label: "Run p50" },
  { field: "run_p95", label: "Run p95" },
];
const RATE = "Failure rate";

export class NamesView extends View {
  title = "Names";

  /** The length of the period in seconds. */
  get #period() {
    return PERIODS.find(([seconds]) => String(seconds) === this.query.period)?.[0] ?? HOUR;
  }

  load() {
    const { queue } = this.query;
    return this.api.get("names", { queue, since_sec: this.#period, limit: PAGE });
  }

  render() {
    const { app, query } = this;
    return fragment(
      this.heading("Names"),
      filterForm(
        app,
        "names",
        query,
        h("label", { class: "inline-field", key: "queue" }, "Queue", queueSelect(app, query.queue)),
        h(
          "label",
          { class: "inline-field", key: "period" },
          "Period",
          h(
            "select",
            { name: "period", ".value": String(this.#period) },
            PERIODS.map(([seconds, label]) => h("option", { value: seconds }, label)),
          ),
        ),
      ),
      this.data ? this.#table() : this.loading(),
    );
  }

  #table() {
    const { names, total } = this.data;
    if (!names.length)
      return empty("no-names", "No tasks in this period.", "Tasks are grouped by name here.");
    const labels = [...COUNTS.map(({ label }) => label), RATE, ...TIMES.map(({ label }) => label)];
    return fragment(
      h(
        "div",
        { class: "card scrolls", key: "table" },
        h(
          "table",
          { class: "rows names" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Name", ...labels].map((label) => h("th", {}, label)),
            ),
          ),
          h(
            "tbody",
            {},
            names.map((one) => row(one, this.query.queue)),
          ),
        ),
      ),
      h(
        "p",
        { class: "note", key: "note" },
        "Done, failed, failure rate and times are those of the period.",
        total > names.length && ` The first ${number(names.length)} of ${number(total)} names.`,
      ),
    );
  }
}

function row(one, queue) {
  const chosen = { queue, ...nameInAddress(one.name) };
  return h(
    "tr",
    { key: JSON.stringify(one.name), "data-row": one.name ?? "" },
    h(
      "td",
      { "data-label": "Name" },
      h(
        "a",
        { class: one.name === null ? "muted" : "task-name", href: href("tasks", chosen) },
        one.name ?? "no name",
      ),
    ),
    COUNTS.map(({ field, label, view, status }) =>
      h(
        "td",
        { "data-label": label, class: "numeric", key: field },
        h(
          "a",
          { href: href(view, { ...chosen, status }), ...estimateOf(one, field) },
          short(one[field], isEstimate(one, field)),
        ),
      ),
    ),
    h(
      "td",
      {
        "data-label": RATE,
        class: one.failure_rate > 0 ? "numeric alarming" : "numeric",
        key: "rate",
      },
      rateOf(one),
    ),
    TIMES.map(({ field, label }) =>
      h(
        "td",
        { "data-label": label, class: "numeric", key: field },
        one[field] === null ? "—" : took(one[field] * 1000),
      ),
    ),
  );
}

function rateOf(one) {
  if (one.failure_rate === null) return "—";
  return `${isEstimate(one, "failure_rate") ? "~" : ""}${percent(one.failure_rate)}`;
}

function estimateOf(one, field) {
  const estimated = isEstimate(one, field);
  return {
    title: estimated ? `estimate: ${about(one[field])}` : number(one[field]),
    "data-estimated": estimated ? "true" : null,
  };
}
