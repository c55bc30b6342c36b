/* Elements that several views use: badges, empty states, links, buttons. */

import { h } from "../dom.js";
import { percent } from "../format.js";
import { href } from "../routes.js";

/** A task's state as a coloured badge. */
export function stateBadge(task) {
  return h("span", { class: `badge badge-${task.state}` }, task.state);
}

/** An empty state; `name` identifies it for tests. */
export function empty(name, headline, hint, ...more) {
  return h(
    "div",
    { class: "empty", "data-empty": name },
    h("p", { class: "empty-headline" }, headline),
    hint && h("p", { class: "empty-hint" }, hint),
    more,
  );
}

/** A link to a task's page, by its id or its unambiguous reference. */
export function taskLink(id, reference = String(id), text = id) {
  return h("a", { class: "task-id", href: href(["tasks", reference]) }, String(text));
}

export function queueLink(queue, view = "tasks") {
  return h("a", { class: "queue-name", href: href(view, { queue }) }, queue);
}

/** A button; `kind` is "primary", "danger" or "quiet", and `key` identifies it for tests. */
export function button(label, onclick, { kind = "", ...attributes } = {}) {
  return h(
    "button",
    {
      type: "button",
      class: `button ${kind}`.trim(),
      "data-action": attributes.key,
      onclick,
      ...attributes,
    },
    label,
  );
}

/** An error's code and message, as text. */
export function errorText(error) {
  if (!error) return null;
  return h(
    "span",
    { class: "error-text" },
    h("code", { class: "code" }, error.code ?? "no code"),
    " ",
    messageOf(error),
  );
}

/** An error's message without its code, with which that of an exception begins. */
export function messageOf({ code, message }) {
  if (message === code) return ""; // An exception without a text.
  const prefix = `${code}: `;
  return message?.startsWith(prefix) ? message.slice(prefix.length) : (message ?? "");
}

/** Text of any length, truncated by the style sheet, with the whole text as a tooltip. */
export function clipped(text, className = "") {
  return h("span", { class: `clipped ${className}`.trim(), title: text }, text);
}

/** The progress that a running task reported; null if it reported none. */
export function progressText(progress) {
  if (!progress) return null;
  const share =
    progress.fraction === null || progress.fraction === undefined ? "" : percent(progress.fraction);
  return h(
    "span",
    { class: "muted progress" },
    [share, progress.message].filter(Boolean).join(" · "),
  );
}

/** A list of terms and values; empty values are omitted. */
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([term, value]) => h("div", { key: term }, h("dt", {}, term), h("dd", {}, value))),
  );
}

/** Links to the next page and to the first; the browser's back button leads to the previous one. */
export function pager({ next, query, view }) {
  if (!next && !query.cursor) return null;
  return h(
    "nav",
    { class: "pager", "aria-label": "Pages", key: "pager" },
    query.cursor &&
      h(
        "a",
        { class: "button", key: "first", href: href(view, { ...query, cursor: null }) },
        "Newest",
      ),
    next &&
      h(
        "a",
        { class: "button", key: "next", rel: "next", href: href(view, { ...query, cursor: next }) },
        "Older →",
      ),
  );
}
