/* Overview: the queues with their counts and charts, the workers and the last sweep. */

import { fragment, h } from "../dom.js";
import { about, count, duration, isEstimate, number, percent, short } from "../format.js";
import { href } from "../routes.js";
import { agoElement } from "../ticker.js";
import { openEnqueueForm, queueActions, sweepNow } from "../components/queue-actions.js";
import { bars, shareLine } from "../components/chart.js";
import { button, empty } from "../components/common.js";
import { sweeperPanel } from "../components/sweeper.js";
import { workersPanel } from "../components/workers.js";
import { View } from "./view.js";

/** Counts that are older than this, in ms, are shown with their age. */
const STALE_AFTER = 20_000;

const FIGURES = [
  { name: "ready", label: "Ready", status: "ready" },
  { name: "delayed", label: "Delayed", status: "delayed" },
  { name: "processing", label: "Processing", status: "processing" },
  { name: "overdue", label: "Overdue", status: "overdue", alarming: true },
  { name: "done_last_hour", label: "Done, last hour", status: "done" },
  { name: "failed", label: "Failed", status: "failed", alarming: true },
];

export class OverviewView extends View {
  title = "Overview";

  render() {
    const { app } = this;
    const actions = app.mayAct && [
      button("Sweep now", () => sweepNow(app), { key: "sweep" }),
      button("Enqueue…", () => openEnqueueForm(app), { key: "enqueue", kind: "primary" }),
    ];
    if (!app.overview) return fragment(this.heading("Overview", actions), this.loading());
    const { at, queues, minutes, workers } = app.overview;
    return fragment(
      this.heading("Overview", actions),
      app.clock.now() - Date.parse(at) > STALE_AFTER &&
        h(
          "p",
          { class: "note", key: "age", "data-stale-counts": true },
          "Counting is slow, so these counts are older: ",
          agoElement(at),
        ),
      h(
        "section",
        { class: "queues", "aria-label": "Queues", key: "queues" },
        queues.length
          ? queues.map((queue) => this.#card(queue, minutes))
          : empty("no-queues", "No queues yet.", "A queue appears with its first task."),
      ),
      h(
        "div",
        { class: "columns", key: "columns" },
        workersPanel(workers, app),
        sweeperPanel(app.overview, app),
      ),
    );
  }

  #card(queue, minutes) {
    return h(
      "article",
      {
        class: queue.paused ? "card queue is-paused" : "card queue",
        key: queue.queue,
        "data-queue": queue.queue,
      },
      h(
        "header",
        {},
        h("h2", {}, h("a", { href: href("tasks", { queue: queue.queue }) }, queue.queue)),
        queue.paused && h("span", { class: "badge badge-paused" }, "paused"),
        h("span", { class: "oldest" }, describeBacklog(queue)),
        this.app.mayAct && h("div", { class: "actions" }, queueActions(queue, this.app)),
      ),
      h(
        "dl",
        { class: "figures" },
        FIGURES.map((figure) => figureOf(queue, figure)),
      ),
      charts(queue, minutes),
    );
  }
}

function describeBacklog(queue) {
  const { oldest_ready_age_sec: age, next_due_at: due } = queue;
  const bound = isEstimate(queue, "oldest_ready_age_sec") ? "at least " : "";
  if (age !== null) return `oldest ready task: ${bound}${duration(age)}`;
  return due ? "no task ready" : "idle";
}

function figureOf(queue, { name, label, status, alarming }) {
  const value = queue[name];
  const estimated = isEstimate(queue, name);
  const address =
    status === "failed"
      ? href("dead-letters", { queue: queue.queue })
      : status === "processing"
        ? href("processing", { queue: queue.queue })
        : href("tasks", { queue: queue.queue, status });
  return h(
    "div",
    { class: alarming && value > 0 ? "figure alarming" : "figure", "data-figure": name },
    h("dt", {}, label),
    h(
      "dd",
      {},
      h(
        "a",
        {
          href: address,
          title: estimated ? `estimate: ${about(value)}` : number(value),
          "data-estimated": estimated ? "true" : null,
        },
        short(value, estimated),
      ),
    ),
  );
}

function charts(queue, minutes) {
  const done = minutes.done[queue.queue] ?? [];
  const failed = minutes.failed[queue.queue] ?? [];
  const ended = Array.from({ length: 60 }, (_, index) => (done[index] ?? 0) + (failed[index] ?? 0));
  const shares = ended.map((all, index) => (all ? (failed[index] ?? 0) / all : NaN));
  const total = ended.reduce((sum, value) => sum + value, 0);
  const rate = total ? queue.failed_last_hour / total : NaN;
  const peak = Math.max(...ended, 0);
  const estimated = minutes.done_estimated.length + minutes.failed_estimated.length > 0;
  const format = estimated ? about : number;
  return h(
    "div",
    { class: "charts" },
    figure(
      "Throughput",
      total ? `peak ${format(peak)} / min` : "none",
      bars({
        values: ended,
        failures: failed,
        label: `${count(total, "task", "tasks", estimated)} finished in the last hour, peak ${format(peak)} per minute`,
      }),
    ),
    figure(
      "Failure rate",
      total ? percent(rate) : "—",
      shareLine({ shares, label: `Failure rate in the last hour: ${percent(rate)}` }),
    ),
  );
}

function figure(label, value, drawing) {
  return h(
    "figure",
    {},
    h("figcaption", {}, h("span", {}, label), h("span", { class: "value" }, value)),
    drawing,
  );
}
