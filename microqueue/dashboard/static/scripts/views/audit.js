/* Audit: who did what by hand, and to how many. */

import { fragment, h } from "../dom.js";
import { duration, instant, number } from "../format.js";
import { clipped, empty, pager, queueLink } from "../parts/pieces.js";
import { View } from "./view.js";

const PAGE = 100;

export class AuditView extends View {
  title = "Audit";

  load() {
    return this.api.get("audit", { cursor: this.query.cursor, limit: PAGE });
  }

  render() {
    return fragment(this.heading("Audit"), this.data ? this.#table() : this.loading());
  }

  #table() {
    const { items, next_cursor: next } = this.data;
    if (!items.length)
      return empty(
        "Nobody has acted yet.",
        "What is done by a button or through the API is written here.",
      );
    const kept = this.app.config?.audit_retention_sec;
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
              ["When", "Who", "What", "Queue", "On", "How many", "Outcome"].map((name) =>
                h("th", {}, name),
              ),
            ),
          ),
          h("tbody", {}, items.map(row)),
        ),
      ),
      kept && h("p", { class: "note", key: "note" }, `Entries are kept for ${duration(kept)}.`),
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
      { "data-label": "When", class: "when" },
      h("time", { datetime: entry.at, title: entry.at }, instant(entry.at)),
    ),
    h("td", { "data-label": "Who" }, entry.who),
    h("td", { "data-label": "What" }, h("code", {}, entry.action)),
    h("td", { "data-label": "Queue" }, entry.queue ? queueLink(entry.queue) : "—"),
    h(
      "td",
      { "data-label": "On", class: "what" },
      entry.target ? clipped(entry.target, "code") : "—",
    ),
    h("td", { "data-label": "How many", class: "numeric" }, number(entry.count)),
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
