/* The topics: what they keep, and the queues that are bound to them. */

import { fragment, h } from "../dom.js";
import { number, size } from "../format.js";
import { href } from "../routes.js";
import { agoElement } from "../ticker.js";
import { empty, queueLink } from "../components/common.js";
import { topicActions } from "../components/topic-actions.js";
import { View } from "./view.js";

const PAGE = 200;

export class TopicsView extends View {
  title = "Topics";

  load() {
    return this.api.get("topics", { limit: PAGE });
  }

  render() {
    return fragment(
      this.heading("Topics", this.app.mayAct && topicActions(this.app)),
      this.data ? this.#table() : this.loading(),
    );
  }

  #table() {
    const { topics, total } = this.data;
    if (!topics.length)
      return empty("no-topics", "No topics yet.", "Publish a message to see its topic here.");
    return fragment(
      h(
        "div",
        { class: "card scrolls", key: "table" },
        h(
          "table",
          { class: "rows topics" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Topic", "Messages", "Size", "Newest", "Bound queues"].map((name) =>
                h("th", {}, name),
              ),
            ),
          ),
          h("tbody", {}, topics.map(row)),
        ),
      ),
      total > topics.length &&
        h(
          "p",
          { class: "note", key: "note" },
          `The first ${number(topics.length)} of ${number(total)} topics.`,
        ),
    );
  }
}

function row(topic) {
  return h(
    "tr",
    { key: topic.topic, "data-row": topic.topic },
    h(
      "td",
      { "data-label": "Topic" },
      h("a", { class: "queue-name", href: href(["topics", topic.topic]) }, topic.topic),
    ),
    h("td", { "data-label": "Messages", class: "numeric" }, h("span", {}, number(topic.messages))),
    h("td", { "data-label": "Size", class: "numeric" }, h("span", {}, size(topic.bytes))),
    h(
      "td",
      { "data-label": "Newest", class: "when" },
      topic.newest_at ? agoElement(topic.newest_at) : "—",
    ),
    h(
      "td",
      { "data-label": "Bound queues", class: "bindings" },
      topic.bindings.length
        ? topic.bindings.map((binding) =>
            h(
              "span",
              { class: "binding", key: binding.queue, "data-binding": binding.queue },
              queueLink(binding.queue),
              filterText(binding.filter),
            ),
          )
        : "—",
    ),
  );
}

/** The filter of a binding as text; null for all messages. */
export function filterText(filter) {
  if (filter === null) return null;
  const text = typeof filter === "string" ? filter : JSON.stringify(filter);
  return h("code", { class: "muted filter-text" }, text);
}
