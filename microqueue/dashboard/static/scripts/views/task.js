/* One task: its payload, fields, attempts and actions. */

import { fragment, h } from "../dom.js";
import { duration, instant, number, readable } from "../format.js";
import { agoElement, countdownElement, untilElement } from "../ticker.js";
import { taskActions } from "../components/task-actions.js";
import {
  empty,
  errorText,
  facts,
  progressText,
  queueLink,
  stateBadge,
} from "../components/common.js";
import { timeline } from "../components/timeline.js";
import { tracebackDetails } from "../components/traceback.js";
import { View } from "./view.js";

export class TaskView extends View {
  title = "Task";

  open(route) {
    super.open(route);
    const { id, reference } = this.data ?? {};
    if (![String(id), reference].includes(route.rest[0])) this.data = null;
    this.title = `Task ${route.rest[0]}`;
  }

  async load() {
    try {
      return await this.api.get(`tasks/${encodeURIComponent(this.route.rest[0])}`);
    } catch (error) {
      if (error.status === 404) return { missing: true };
      throw error;
    }
  }

  render() {
    const task = this.data;
    const id = this.route.rest[0];
    if (!task) return fragment(this.heading(id), this.loading());
    if (task.missing)
      return fragment(
        this.heading(id),
        empty(
          "no-such-task",
          "Task not found.",
          "It may have been discarded, or deleted after its retention period.",
        ),
      );
    return fragment(
      h(
        "div",
        { class: "heading", key: "heading" },
        h(
          "h1",
          {},
          h("span", { class: "muted" }, task.name ?? "Task"),
          " ",
          h("code", { class: "task-id" }, String(task.id)),
        ),
        stateBadge(task),
        h("div", { class: "actions" }, taskActions(task, this.app)),
      ),
      task.error &&
        h(
          "div",
          { class: "card notice", key: "error" },
          h("h2", {}, "Last error"),
          h("p", {}, errorText(task.error)),
          tracebackDetails(task.error.traceback),
        ),
      h(
        "div",
        { class: "columns task-columns", key: "columns" },
        h(
          "div",
          { class: "stack" },
          json("Payload", task.payload),
          json("Headers", task.headers),
          json("Result", task.result),
        ),
        h("div", { class: "stack" }, this.#facts(task), timeline(task)),
      ),
    );
  }

  #facts(task) {
    return h(
      "section",
      { class: "card panel", key: "facts" },
      facts([
        ["Queue", queueLink(task.queue)],
        ["Attempts", `${number(task.attempts)} of ${number(task.max_attempts)}`],
        ["Next attempt", nextAttempt(task)],
        ["Lease expires in", this.#lease(task)],
        ["Progress", progressText(task.progress)],
        ["Worker", task.worker_id && h("code", {}, task.worker_id)],
        ["Priority", task.priority ? number(task.priority) : null],
        ["Created", when(task.created_at)],
        ["Updated", when(task.updated_at)],
        ["Finished", when(task.finished_at)],
        ["Expires", task.expires_at && task.status === "pending" && untilElement(task.expires_at)],
        ["Dedupe key", task.dedupe_key && h("code", {}, task.dedupe_key)],
        ["Replays", task.replays ? number(task.replays) : null],
        ["Worker crashes", task.crashes ? number(task.crashes) : null],
        ["Redelivered", task.redelivered ? "yes" : null],
        [
          "Visibility timeout",
          task.visibility_timeout_sec && duration(task.visibility_timeout_sec),
        ],
      ]),
    );
  }

  #lease(task) {
    if (task.status !== "processing") return null;
    return countdownElement({
      startedAt: task.started_at,
      deadline: task.lease_expires_at,
      timeout: task.visibility_timeout_sec ?? this.app.config?.visibility_timeout_sec,
    });
  }
}

function nextAttempt(task) {
  if (task.status !== "pending" || !task.next_retry_at) return null;
  return h(
    "span",
    {},
    untilElement(task.next_retry_at),
    h("span", { class: "muted" }, ` · ${instant(task.next_retry_at)}`),
  );
}

function when(value) {
  return (
    value && h("span", {}, instant(value), h("span", { class: "muted" }, " · ", agoElement(value)))
  );
}

function json(title, value) {
  const nothing =
    value === null ||
    value === undefined ||
    (typeof value === "object" && !Object.keys(value).length);
  if (nothing && title !== "Payload") return null;
  return h(
    "section",
    { class: "card panel", key: title, "data-part": title.toLowerCase() },
    h("header", {}, h("h2", {}, title)),
    h("pre", { class: "json", tabindex: 0 }, readable(value)),
  );
}
