/* Dead letters: what died, why, and what becomes of it. */

import { fragment, h } from "../dom.js";
import { count, isEstimate, short } from "../format.js";
import { href } from "../routes.js";
import { Selection } from "../selection.js";
import { LetterFilter } from "../parts/letter-filter.js";
import { groupsPanel } from "../parts/letter-groups.js";
import { selectionBar } from "../parts/letter-actions.js";
import { lettersTable } from "../parts/letter-table.js";
import { filterForm, textFilter, timeFilter } from "../parts/filter.js";
import { unfinished } from "../parts/search-on.js";
import { empty, pager } from "../parts/pieces.js";
import { View } from "./view.js";

const PAGE = 50;

export class DeadLettersView extends View {
  title = "Dead letters";
  selection = new Selection();

  open(route) {
    const before = this.filter?.key;
    super.open(route);
    this.filter = new LetterFilter(route.query);
    this.title = `Dead letters of ${this.filter.place}`;
    // Another page of the same letters keeps the selection; other letters do not.
    if (before !== undefined && before !== this.filter.key) this.selection.clear();
  }

  async load() {
    const { query } = this;
    const [page, groups] = await Promise.all([
      this.api.get("dead-letters", {
        ...this.filter.letters(),
        cursor: this.query.cursor,
        limit: PAGE,
      }),
      this.api.get("dead-letters/groups", this.filter.groups()),
    ]);
    return { page, groups, query };
  }

  render() {
    const { app, query } = this;
    return fragment(
      this.heading(
        fragment("Dead letters ", h("span", { class: "muted" }, `of ${this.filter.place}`)),
      ),
      queueTabs(app, this.filter.queue),
      filterForm(
        app,
        "dead-letters",
        query,
        query.queue &&
          h("input", { type: "hidden", name: "queue", value: query.queue, key: "queue" }),
        textFilter("text", "Text", query.text, {
          placeholder: "in the error",
          "data-filter": true,
        }),
        textFilter("code", "Code", query.code, { size: 12 }),
        timeFilter("since", "From", query.since),
        timeFilter("until", "To", query.until),
      ),
      this.data ? this.#letters() : this.loading(),
    );
  }

  #letters() {
    const { page, groups } = this.data;
    if (!page.items.length && !groups.groups.length && page.complete !== false)
      return this.#nothing();
    return h(
      "div",
      { class: "letters", key: "letters" },
      groupsPanel(groups, this.filter),
      h(
        "div",
        // Letters of the filter before must not be selected under this one.
        { class: "stack", key: "list", inert: this.data.query !== this.query },
        selectionBar(this),
        page.items.length ? lettersTable(this) : empty(absence(page)),
        this.#more(page),
      ),
    );
  }

  #more({ complete, next_cursor: next }) {
    const { app, query } = this;
    const place = { query, view: "dead-letters", next };
    if (complete !== false) return pager(place);
    return unfinished({ app, path: "dead-letters", filter: this.filter.letters(), ...place });
  }

  #nothing() {
    if (!this.filter.narrowed && !this.filter.queue)
      return empty(
        "No dead letters in any queue. Nice.",
        "A task that fails for good would wait here for you.",
      );
    if (!this.filter.narrowed)
      return empty(
        `No dead letters in ${this.filter.queue}.`,
        null,
        h("a", { href: href("dead-letters") }, "Show all queues"),
      );
    return empty(
      `No dead letter of ${this.filter.place} matches.`,
      null,
      h("a", { href: href("dead-letters", { queue: this.query.queue }) }, "Show all"),
    );
  }
}

function absence({ complete }) {
  return complete === false ? "Nothing found yet among the newest." : "No letter on this page.";
}

/** All queues together, those that have dead letters, and the one that is shown. */
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
