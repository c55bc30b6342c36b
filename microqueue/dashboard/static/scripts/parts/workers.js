/* Who works: the workers that are alive, and what each of them holds. */

import { h } from "../dom.js";
import { count, number } from "../format.js";
import { agoElement, countdownElement } from "../ticker.js";
import { empty, taskLink } from "./pieces.js";

const SHOWN = 5;

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
      : empty("No workers.", "Tasks wait until one starts: microqueue worker myapp:send"),
  );
}

function item(worker, app) {
  return h(
    "li",
    { key: worker.id, class: worker.alive ? "" : "is-gone" },
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
      h("span", { class: "muted" }, `${count(worker.handled, "task")} handled`),
      h(
        "span",
        { class: "muted" },
        worker.alive ? "heard " : "gone, last heard ",
        agoElement(worker.heartbeat_at),
      ),
    ),
    worker.holds?.length > 0 && held(worker.holds, app),
  );
}

function held(holds, app) {
  return h(
    "ul",
    { class: "held" },
    holds.slice(0, SHOWN).map((task) =>
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
    holds.length > SHOWN && h("li", { class: "muted" }, `and ${number(holds.length - SHOWN)} more`),
  );
}
