/* Dead letters grouped by error code and normalised message. */

import { h } from "../dom.js";
import { count, number } from "../format.js";
import { agoElement } from "../ticker.js";
import { messageOf } from "./common.js";

export function groupsPanel({ groups, more_groups: more, total, truncated }, filter) {
  return h(
    "section",
    { class: "card panel groups", key: "groups", "aria-label": "Groups" },
    h(
      "header",
      {},
      h("h2", {}, "By error"),
      h(
        "span",
        { class: "muted" },
        `${number(total)}${truncated ? "+" : ""} ${total === 1 ? "dead letter" : "dead letters"}`,
      ),
    ),
    h(
      "ul",
      {},
      groups.map((group) => item(group, filter)),
    ),
    more > 0 &&
      h(
        "p",
        { class: "note", key: "more", "data-hidden-groups": more },
        `${count(more, "smaller group")} not shown`,
      ),
  );
}

function item(group, filter) {
  return h(
    "li",
    { key: JSON.stringify([group.code, group.message]) },
    h(
      "a",
      {
        href: filter.addressOf(group),
        "aria-current": filter.isSelected(group) ? "true" : null,
        title: group.sample,
      },
      h(
        "span",
        { class: "group-line" },
        h("code", { class: "code" }, group.code ?? "no code"),
        h("span", { class: "count" }, number(group.count)),
      ),
      h("span", { class: "group-message" }, messageOf(group) || "no message"),
      h(
        "span",
        { class: "muted" },
        "first ",
        agoElement(group.first_at),
        " · last ",
        agoElement(group.last_at),
      ),
    ),
  );
}
