/* The audit log: who did what, when, and to how many tasks. */

import { fragment, h } from "../dom.js";
import { duration, instant, number } from "../format.js";
import { clipped, empty, pager, queueLink } from "../components/common.js";
import { View } from "./view.js";

const PAGE = 100;

export class AuditView extends View {
  title = "Audit log";

  load() {
    return this.api.get("audit", { cursor: this.query.cursor, limit: PAGE });
  }

  render() {
    return fragment(this.heading("Audit log"), this.data ? this.#table() : this.loading());
  }

  #table() {
    const { items, next_cursor: next } = this.data;
    if (!items.length)
      return empty(
        "no-actions",
        "No actions yet.",
        "Actions on this page and through the REST API are recorded here.",
      );
    const retention = this.app.config?.audit_retention_sec;
    return fragment(
      h(
        "div",
        { class: "card scrolls", key: "table" },
        h(
          "table",
          { class: "rows audit" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Time", "User", "Action", "Queue", "Target", "Count", "Outcome"].map((name) =>
                h("th", {}, name),
              ),
            ),
          ),
          h("tbody", {}, items.map(row)),
        ),
      ),
      retention &&
        h("p", { class: "note", key: "note" }, `Entries are kept for ${duration(retention)}.`),
      pager({ next, query: this.query, view: "audit" }),
    );
  }
}

function row(entry) {
  return h(
    "tr",
    { key: entry.id, "data-row": entry.id },
    h(
      "td",
      { "data-label": "Time", class: "when" },
      h("time", { datetime: entry.at, title: entry.at }, instant(entry.at)),
    ),
    h("td", { "data-label": "User", class: "user" }, clipped(entry.who)),
    h("td", { "data-label": "Action" }, h("code", {}, entry.action)),
    h("td", { "data-label": "Queue" }, entry.queue ? queueLink(entry.queue) : "—"),
    h(
      "td",
      { "data-label": "Target", class: "what" },
      entry.target ? clipped(entry.target, "code") : "—",
    ),
    h("td", { "data-label": "Count", class: "numeric" }, number(entry.count)),
    h(
      "td",
      { "data-label": "Outcome" },
      h(
        "span",
        { class: entry.outcome === "ok" ? "badge badge-done" : "badge badge-failed" },
        entry.outcome,
      ),
    ),
  );
}
