/* All tasks, newest first, with a filter in the address. */

import { fragment, h } from "../dom.js";
import { brief, number } from "../format.js";
import { href } from "../routes.js";
import { agoElement, untilElement } from "../ticker.js";
import { openEnqueueForm, markNextButtons } from "../components/queue-actions.js";
import {
  filterForm,
  nameFilter,
  nameParameter,
  queueSelect,
  textFilter,
  timeFilter,
} from "../components/filter.js";
import { continueSearchPanel } from "../components/continue-search.js";
import {
  button,
  clipped,
  empty,
  errorText,
  pager,
  queueLink,
  stateBadge,
  taskLink,
} from "../components/common.js";
import { View } from "./view.js";

const STATES = ["ready", "delayed", "pending", "processing", "overdue", "done", "failed"];
const PAGE = 50;

export class TasksView extends View {
  title = "Tasks";

  async load() {
    const { id } = this.query;
    const filter = this.#filter();
    if (!id) return this.api.get("tasks", { ...filter, limit: PAGE });
    return { items: await this.#byId(id, filter), next_cursor: null, complete: true };
  }

  /** The filter in the address, as the API's parameters. */
  #filter() {
    const { id, no_name: unnamed, ...filter } = this.query;
    return { ...filter, name: nameParameter(this.query) };
  }

  async #byId(id, filter) {
    try {
      const task = await this.api.get(`tasks/${encodeURIComponent(id)}`);
      const fits =
        (!filter.queue || task.queue === filter.queue) &&
        (filter.name === undefined || (task.name ?? "") === filter.name) &&
        (!filter.status || hasStatus(task, filter.status));
      return fits ? [task] : [];
    } catch (error) {
      if (error.status === 404) return [];
      throw error;
    }
  }

  render() {
    const { app, query } = this;
    const { queue } = query;
    const paused = app.overview?.queues.find((one) => one.queue === queue)?.paused ?? false;
    return fragment(
      this.heading(
        "Tasks",
        app.mayAct && [
          ...(queue ? markNextButtons(queue, app, { disabled: paused }) : []),
          button("Enqueue…", () => openEnqueueForm(app, queue), {
            kind: "primary",
            key: "enqueue",
          }),
        ],
      ),
      filterForm(
        app,
        "tasks",
        query,
        h("label", { class: "inline-field", key: "queue" }, "Queue", queueSelect(app, query.queue)),
        h("label", { class: "inline-field", key: "status" }, "Status", statusSelect(query.status)),
        nameFilter(query.name),
        textFilter("text", "Text", query.text, {
          placeholder: "in payload or error",
          "data-filter": true,
        }),
        textFilter("code", "Code", query.code, { size: 10 }),
        textFilter("id", "ID", query.id, { size: 14 }),
        timeFilter("since", "From", query.since),
        timeFilter("until", "To", query.until),
      ),
      this.data ? this.#table() : this.loading(),
    );
  }

  #table() {
    const { items, next_cursor: next, complete } = this.data;
    return fragment(
      items.length
        ? h(
            "div",
            { class: "card scrolls", key: "table" },
            h(
              "table",
              { class: "rows tasks" },
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  ["Task", "Status", "Queue", "Payload / error", "Attempts", "Created"].map(
                    (name) => h("th", {}, name),
                  ),
                ),
              ),
              h("tbody", {}, items.map(row)),
            ),
          )
        : this.#emptyState(complete),
      complete === false
        ? continueSearchPanel({
            app: this.app,
            path: "tasks",
            filter: this.#filter(),
            query: this.query,
            view: "tasks",
            next,
          })
        : pager({ next, query: this.query, view: "tasks" }),
    );
  }

  #emptyState(complete) {
    if (complete === false) return empty("no-match-yet", "No match yet.");
    const filtered = Object.keys(this.query).length > 0;
    return filtered
      ? empty(
          "no-match",
          "No matching tasks.",
          null,
          h("a", { href: href("tasks") }, "Show all tasks"),
        )
      : empty("no-tasks", "No tasks yet.", "Enqueue one to see it here.");
  }
}

function row(task) {
  return h(
    "tr",
    { key: task.reference, "data-row": task.id },
    h(
      "td",
      { "data-label": "Task" },
      taskLink(task.id, task.reference),
      task.name && h("span", { class: "muted name" }, task.name),
    ),
    h(
      "td",
      { "data-label": "Status", class: "state" },
      stateBadge(task),
      task.state === "delayed" &&
        h("span", { class: "muted due" }, untilElement(task.next_retry_at)),
    ),
    h("td", { "data-label": "Queue" }, queueLink(task.queue)),
    h(
      "td",
      { "data-label": "Payload / error", class: "what" },
      clipped(brief(task.preview ?? ""), "code preview"),
      task.error && errorText(task.error),
    ),
    h(
      "td",
      { "data-label": "Attempts", class: "numeric" },
      `${number(task.attempts)} of ${number(task.max_attempts)}`,
    ),
    h("td", { "data-label": "Created", class: "when" }, agoElement(task.created_at)),
  );
}

function statusSelect(chosen) {
  return h(
    "select",
    { name: "status", ".value": chosen ?? "" },
    h("option", { value: "" }, "Any"),
    STATES.map((state) => h("option", { value: state }, state)),
  );
}

function hasStatus(task, status) {
  return task.status === status || task.state === status;
}
