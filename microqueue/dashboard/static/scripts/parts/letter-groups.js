/* Dead letters by what killed them: code and message, with numbers taken out of the message. */

import { h } from "../dom.js";
import { count, number } from "../format.js";
import { agoElement } from "../ticker.js";

export function groupsPanel({ groups, more_groups: more, total, truncated }, filter) {
  return h(
    "section",
    { class: "card panel groups", key: "groups", "aria-label": "Groups" },
    h(
      "header",
      {},
      h("h2", {}, "By error"),
      h("span", { class: "muted" }, `${count(total, "letter")}${truncated ? " and more" : ""}`),
    ),
    h(
      "ul",
      {},
      groups.map((group) => item(group, filter)),
    ),
    more > 0 &&
      h("p", { class: "note", key: "more" }, `and ${count(more, "smaller group")}, not shown`),
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
        "aria-current": filter.isChosen(group) ? "true" : null,
        title: group.sample,
      },
      h(
        "span",
        { class: "group-line" },
        h("code", { class: "code" }, group.code ?? "no code"),
        h("span", { class: "count" }, number(group.count)),
      ),
      h("span", { class: "group-message" }, group.message || "no message"),
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
