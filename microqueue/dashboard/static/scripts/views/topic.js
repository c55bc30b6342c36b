/* One topic: its bindings and its newest messages. `?position=` shows one of them whole. */

import { fragment, h } from "../dom.js";
import { brief, duration, instant, number, readable, size } from "../format.js";
import { href } from "../routes.js";
import { agoElement } from "../ticker.js";
import { clipped, empty, facts, queueLink } from "../components/common.js";
import { topicActions, unbindButton } from "../components/topic-actions.js";
import { filterText } from "./topics.js";
import { View } from "./view.js";

const PAGE = 50;

export class TopicView extends View {
  title = "Topic";

  open(route) {
    if (this.route?.rest[0] !== route.rest[0]) this.data = null;
    super.open(route);
    this.title = `Topic ${route.rest[0]}`;
  }

  get #name() {
    return this.route.rest[0];
  }

  async load() {
    const path = `topics/${encodeURIComponent(this.#name)}`;
    const [list, messages, message] = await Promise.all([
      this.api.get("topics", { topic: this.#name }),
      this.api.get(`${path}/messages`, { limit: PAGE }),
      this.#message(path, this.query.position),
    ]);
    return { topic: list.topics[0] ?? null, items: messages.items, message };
  }

  async #message(path, position) {
    if (!position) return null;
    try {
      return await this.api.get(`${path}/message`, { position });
    } catch (error) {
      if (error.status === 404) return { missing: true };
      throw error;
    }
  }

  render() {
    const { app, data } = this;
    return fragment(
      h(
        "div",
        { class: "heading", key: "heading" },
        h("h1", {}, h("span", { class: "muted" }, "Topic"), " ", this.#name),
        h("div", { class: "actions" }, app.mayAct && topicActions(app, this.#name)),
      ),
      data ? this.#content(data) : this.loading(),
    );
  }

  #content({ topic, items, message }) {
    if (!topic)
      return empty("no-such-topic", "This topic has neither messages nor bound queues.");
    return fragment(
      message && this.#whole(message),
      h("section", { class: "card panel", key: "facts" }, kept(topic)),
      h("h2", { key: "bindings-heading" }, "Bound queues"),
      this.#bindings(topic.bindings),
      h("h2", { key: "messages-heading" }, "Newest messages"),
      this.#messages(items),
    );
  }

  #whole(message) {
    if (message.missing)
      return h(
        "div",
        { key: "message" },
        empty("no-such-message", "The topic no longer has this message."),
      );
    const json = (value) => h("pre", { class: "json", tabindex: 0 }, readable(value));
    return fragment(
      h(
        "section",
        { class: "card panel", key: "message", "data-part": "message" },
        h("header", {}, h("h2", {}, "Message")),
        facts([
          ["Position", h("code", {}, message.position)],
          ["Published", message.published_at && instant(message.published_at)],
          ["Key", message.key && h("code", {}, message.key)],
        ]),
        json(message.body),
      ),
      Object.keys(message.headers).length > 0 &&
        h(
          "section",
          { class: "card panel", key: "headers", "data-part": "headers" },
          h("header", {}, h("h2", {}, "Headers")),
          json(message.headers),
        ),
    );
  }

  #bindings(bindings) {
    if (!bindings.length)
      return empty(
        "no-bindings",
        "No queue is bound.",
        "Messages go to subscribers only. Bind a queue to make each of them a task.",
      );
    const row = (binding) =>
      h(
        "tr",
        { key: binding.queue, "data-row": binding.queue, "data-binding": binding.queue },
        h("td", { "data-label": "Queue" }, queueLink(binding.queue)),
        h("td", { "data-label": "Messages" }, filterText(binding.filter) ?? h("span", {}, "all")),
        h("td", { "data-label": "Tasks" }, h("span", {}, options(binding))),
        h("td", { "data-label": "Bound", class: "when" }, agoElement(binding.bound_at)),
        this.app.mayAct &&
          h(
            "td",
            { class: "row-actions" },
            unbindButton(this.app, this.#name, binding.queue),
          ),
      );
    return table("bindings", ["Queue", "Messages", "Tasks", "Bound", ""], bindings.map(row));
  }

  #messages(items) {
    if (!items.length) return empty("no-messages", "No messages.");
    const row = (message) =>
      h(
        "tr",
        { key: message.position, "data-row": message.position },
        h(
          "td",
          { "data-label": "Position" },
          h(
            "a",
            {
              class: "task-id",
              href: href(["topics", this.#name], { position: message.position }),
            },
            message.position,
          ),
        ),
        h("td", { "data-label": "Key" }, message.key ? h("code", {}, message.key) : "—"),
        h(
          "td",
          { "data-label": "Message", class: "what" },
          clipped(brief(message.preview), "code preview"),
        ),
        h("td", { "data-label": "Published", class: "when" }, agoElement(message.published_at)),
      );
    return table("messages", ["Position", "Key", "Message", "Published"], items.map(row));
  }
}

function table(name, columns, rows) {
  return h(
    "div",
    { class: "card scrolls", key: name },
    h(
      "table",
      { class: `rows ${name}` },
      h("thead", {}, h("tr", {}, columns.map((column) => h("th", {}, column)))),
      h("tbody", {}, rows),
    ),
  );
}

function kept(topic) {
  if (topic.max_messages === null && topic.max_bytes === null)
    return facts([["Messages", "none are kept"]]);
  return facts([
    ["Messages", `${number(topic.messages)} of at most ${number(topic.max_messages)}`],
    ["Size", `${size(topic.bytes)} of at most ${size(topic.max_bytes)}`],
    ["Oldest", topic.oldest_at && agoElement(topic.oldest_at)],
    ["Newest", topic.newest_at && agoElement(topic.newest_at)],
  ]);
}

function options(binding) {
  const texts = [`${number(binding.max_attempts)} attempts`];
  if (binding.priority) texts.push(`priority ${number(binding.priority)}`);
  if (binding.delay_sec) texts.push(`delay ${duration(binding.delay_sec)}`);
  if (binding.expires_in_sec) texts.push(`expire after ${duration(binding.expires_in_sec)}`);
  return texts.join(" · ");
}
