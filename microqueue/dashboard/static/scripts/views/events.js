/* Events, as they happen. */

import { fragment, h } from "../dom.js";
import { number, timeOfDay } from "../format.js";
import { describeChanges } from "../components/sweeper.js";
import { clipped, empty, queueLink, taskLink } from "../components/common.js";
import { View } from "./view.js";

const MAX_TASKS = 3;

export class EventsView extends View {
  title = "Events";

  render() {
    const { recentEvents } = this.app;
    return fragment(
      this.heading("Events"),
      recentEvents.length
        ? h(
            "ol",
            { class: "card feed", key: "feed", "aria-label": "Events, newest first" },
            recentEvents.map(item),
          )
        : empty("no-events", "No events yet.", "Events appear here while this page is open."),
    );
  }
}

function item(event) {
  const [family] = event.type.split(".");
  return h(
    "li",
    { key: `${event.id} ${event.type}`, class: `family-${family}` },
    h("time", { datetime: event.at, title: event.at }, timeOfDay(event.at)),
    h("code", { class: `event-type type-${event.type.replace(".", "-")}` }, event.type),
    h("span", { class: "event-count" }, event.count > 1 ? `× ${number(event.count)}` : ""),
    h("span", { class: "event-detail" }, detail(event)),
  );
}

function detail(event) {
  if (event.report) return describeChanges(event.report) || "no changes";
  if (event.workers) return clipped(event.workers.join(", "), "code");
  const parts = (event.queues ?? [event.queue].filter(Boolean)).map((queue) => queueLink(queue));
  const tasks = (event.tasks ?? []).slice(0, MAX_TASKS).map(({ id }) => taskLink(id));
  const more = (event.count ?? 0) - tasks.length;
  if (tasks.length && more > 0)
    tasks.push(h("span", { class: "muted" }, `and ${number(more)} more`));
  if (event.triggered_by) parts.push(h("span", { class: "muted" }, `by ${event.triggered_by}`));
  if (event.dlq_count)
    parts.push(h("span", {}, `${number(event.dlq_count)} moved to dead letters`));
  return [...parts, ...tasks].flatMap((part) => [part, " "]);
}
