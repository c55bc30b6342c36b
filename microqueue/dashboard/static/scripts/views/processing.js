/* Processing: the running tasks, their workers, and when their leases expire. */

import { fragment, h } from "../dom.js";
import { about, instant, number } from "../format.js";
import { agoElement, countdownElement } from "../ticker.js";
import { queueFilter } from "../components/filter.js";
import { clipped, empty, progressText, queueLink, taskLink } from "../components/common.js";
import { View } from "./view.js";

const LIMIT = 200;
const COLUMNS = ["Task", "Queue", "Worker", "Attempt", "Progress", "Started", "Lease expires in"];

export class ProcessingView extends View {
  title = "Processing";

  load() {
    return this.api.get("running", { queue: this.query.queue, limit: LIMIT });
  }

  render() {
    return fragment(
      this.heading("Processing", queueFilter(this.app, "processing", this.query)),
      this.data ? this.#table() : this.loading(),
    );
  }

  #table() {
    const { items, total, estimated } = this.data;
    if (!items.length)
      return empty(
        "nothing-running",
        "No running tasks.",
        "Tasks appear here while a worker runs them.",
      );
    return fragment(
      h(
        "div",
        { class: "card scrolls", key: "table" },
        h(
          "table",
          { class: "rows processing" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              COLUMNS.map((name) => h("th", {}, name)),
            ),
          ),
          h(
            "tbody",
            {},
            items.map((task) => this.#row(task)),
          ),
        ),
      ),
      total > items.length &&
        h(
          "p",
          { class: "note", key: "note" },
          `Showing ${number(items.length)} of ${estimated ? about(total) : number(total)}: the leases that expire first.`,
        ),
    );
  }

  #row(task) {
    return h(
      "tr",
      { key: task.id, "data-row": task.id },
      h(
        "td",
        { "data-label": "Task" },
        taskLink(task.id),
        task.name && h("span", { class: "muted name" }, task.name),
      ),
      h("td", { "data-label": "Queue" }, queueLink(task.queue, "processing")),
      h("td", { "data-label": "Worker" }, task.worker_id ? clipped(task.worker_id, "code") : "—"),
      h(
        "td",
        { "data-label": "Attempt" },
        `${number(task.attempt)} of ${number(task.max_attempts)}`,
      ),
      h("td", { "data-label": "Progress" }, progressText(task.progress)),
      h(
        "td",
        { "data-label": "Started", title: instant(task.started_at) },
        agoElement(task.started_at),
      ),
      h(
        "td",
        { "data-label": "Lease expires in", class: "lease" },
        countdownElement({
          startedAt: task.started_at,
          deadline: task.lease_expires_at,
          timeout: this.app.config?.visibility_timeout_sec,
        }),
      ),
    );
  }
}
