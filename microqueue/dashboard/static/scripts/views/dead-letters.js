/* Dead letters: groups by error, the list, and actions on a selection. */

import { fragment, h } from "../dom.js";
import { count, isEstimate, short } from "../format.js";
import { href } from "../routes.js";
import { Selection } from "../selection.js";
import { DeadLetterFilter } from "../components/dead-letter-filter.js";
import { groupsPanel } from "../components/dead-letter-groups.js";
import { selectionBar } from "../components/dead-letter-actions.js";
import { deadLetterTable } from "../components/dead-letter-table.js";
import { filterForm, nameFilter, textFilter, timeFilter } from "../components/filter.js";
import { continueSearchPanel } from "../components/continue-search.js";
import { empty, pager } from "../components/common.js";
import { View } from "./view.js";

const PAGE = 50;

export class DeadLettersView extends View {
  title = "Dead letters";
  selection = new Selection();

  open(route) {
    const before = this.filter?.key;
    super.open(route);
    this.filter = new DeadLetterFilter(route.query);
    this.title = `Dead letters in ${this.filter.scopeLabel}`;
    // Another page of the same filter keeps the selection; another filter clears it.
    if (before !== undefined && before !== this.filter.key) this.selection.clear();
  }

  async load() {
    const { query } = this;
    const [page, groups] = await Promise.all([
      this.api.get("dead-letters", {
        ...this.filter.queryForList(),
        cursor: this.query.cursor,
        limit: PAGE,
      }),
      this.api.get("dead-letters/groups", this.filter.queryForGroups()),
    ]);
    return { page, groups, query };
  }

  render() {
    const { app, query } = this;
    return fragment(
      this.heading(
        fragment(
          "Dead letters ",
          h(
            "span",
            { class: "muted" },
            "in ",
            h("span", { "data-scope": true }, this.filter.scopeLabel),
          ),
        ),
      ),
      queueTabs(app, this.filter.queue),
      filterForm(
        app,
        "dead-letters",
        query,
        query.queue &&
          h("input", { type: "hidden", name: "queue", value: query.queue, key: "queue" }),
        nameFilter(query.name),
        textFilter("text", "Text", query.text, {
          placeholder: "in the error message",
          "data-filter": true,
        }),
        textFilter("code", "Code", query.code, { size: 12 }),
        timeFilter("since", "From", query.since),
        timeFilter("until", "To", query.until),
      ),
      this.data ? this.#content() : this.loading(),
    );
  }

  #content() {
    const { page, groups } = this.data;
    if (!page.items.length && !groups.groups.length && page.complete !== false)
      return this.#emptyState();
    return h(
      "div",
      { class: "dead-letters", key: "dead-letters" },
      groupsPanel(groups, this.filter),
      h(
        "div",
        // Rows of the previous filter must not be selected under the new one.
        { class: "stack", key: "list", inert: this.data.query !== this.query },
        selectionBar(this),
        page.items.length ? deadLetterTable(this) : emptyPage(page),
        this.#more(page),
      ),
    );
  }

  #more({ complete, next_cursor: next }) {
    const { app, query } = this;
    const paging = { query, view: "dead-letters", next };
    if (complete !== false) return pager(paging);
    return continueSearchPanel({
      app,
      path: "dead-letters",
      filter: this.filter.queryForList(),
      ...paging,
    });
  }

  #emptyState() {
    if (!this.filter.narrowed && !this.filter.queue)
      return empty(
        "no-dead-letters",
        "No dead letters in any queue.",
        "Tasks that fail permanently appear here.",
      );
    if (!this.filter.narrowed)
      return empty(
        "no-dead-letters-in-queue",
        `No dead letters in ${this.filter.queue}.`,
        null,
        h("a", { href: href("dead-letters") }, "Show all queues"),
      );
    return empty(
      "no-match",
      `No matching dead letters in ${this.filter.scopeLabel}.`,
      null,
      h("a", { href: href("dead-letters", { queue: this.query.queue }) }, "Show all"),
    );
  }
}

function emptyPage({ complete }) {
  return complete === false
    ? empty("no-match-yet", "No match yet.")
    : empty("empty-page", "No dead letters on this page.");
}

/** Tabs: all queues, each queue with dead letters, and the selected queue. */
function queueTabs(app, current) {
  const queues = (app.overview?.queues ?? []).filter(
    ({ queue, failed }) => failed > 0 || queue === current,
  );
  if (queues.length < 2 && current === undefined) return null;
  return h(
    "nav",
    { class: "tabs", "aria-label": "Queues", key: "tabs" },
    h(
      "a",
      {
        key: "",
        href: href("dead-letters"),
        "aria-current": current === undefined ? "page" : null,
      },
      "All queues",
    ),
    queues.map((one) => {
      const { queue, failed } = one;
      const estimated = isEstimate(one, "failed");
      return h(
        "a",
        {
          key: queue,
          href: href("dead-letters", { queue }),
          "aria-current": queue === current ? "page" : null,
          title: count(failed, "dead letter", "dead letters", estimated),
        },
        queue,
        h("span", { class: "count" }, estimated ? short(failed, true) : failed),
      );
    }),
  );
}
