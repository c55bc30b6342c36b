/* The registered workers, and the tasks that each of them runs. */

import { h } from "../dom.js";
import { count, number } from "../format.js";
import { agoElement, countdownElement } from "../ticker.js";
import { empty, taskLink } from "./common.js";

const MAX_TASKS = 5;

export function workersPanel(workers, app) {
  const alive = workers.filter((worker) => worker.alive).length;
  return h(
    "section",
    { class: "card panel workers", key: "workers" },
    h(
      "header",
      {},
      h("h2", {}, "Workers"),
      h("span", { class: "muted" }, `${number(alive)} alive`),
    ),
    workers.length
      ? h(
          "ul",
          { class: "worker-list" },
          workers.map((worker) => item(worker, app)),
        )
      : empty(
          "no-workers",
          "No workers.",
          "Tasks wait until a worker starts: microqueue worker myapp:send",
        ),
  );
}

function item(worker, app) {
  return h(
    "li",
    { key: worker.id, class: worker.alive ? "" : "is-gone", "data-worker": worker.id },
    h(
      "div",
      { class: "worker-line" },
      h("span", { class: worker.alive ? "dot dot-alive" : "dot dot-gone", "aria-hidden": "true" }),
      h("code", { class: "worker-id" }, worker.id),
      h("span", { class: "muted" }, (worker.queues ?? []).join(", ")),
      h(
        "span",
        { class: "worker-load" },
        `${number(worker.running)} of ${number(worker.concurrency)} busy`,
      ),
      h("span", { class: "muted" }, `${count(worker.handled, "task")} processed`),
      h(
        "span",
        { class: "muted" },
        worker.alive ? "last heartbeat " : "gone, last heartbeat ",
        agoElement(worker.heartbeat_at),
      ),
    ),
    worker.holds?.length > 0 && runningTasks(worker.holds, app),
  );
}

function runningTasks(holds, app) {
  return h(
    "ul",
    { class: "running-tasks" },
    holds.slice(0, MAX_TASKS).map((task) =>
      h(
        "li",
        { key: task.id },
        taskLink(task.id),
        countdownElement({
          startedAt: task.started_at,
          deadline: task.lease_expires_at,
          timeout: app.config?.visibility_timeout_sec,
        }),
      ),
    ),
    holds.length > MAX_TASKS &&
      h("li", { class: "muted" }, `and ${number(holds.length - MAX_TASKS)} more`),
  );
}
