/* What the sweeper did last, when, and who it was. */

import { h } from "../dom.js";
import { count, took } from "../format.js";
import { agoElement } from "../ticker.js";
import { empty, facts } from "./pieces.js";

const MOVES = ["reclaimed", "promoted", "buried", "expired", "purged", "moved"];

export function sweeperPanel({ last_sweep: last, last_active_sweep: active }) {
  return h(
    "section",
    { class: "card panel sweeper", key: "sweeper" },
    h(
      "header",
      {},
      h("h2", {}, "Sweeper"),
      last && h("span", { class: "muted" }, "last ran ", agoElement(last.at)),
    ),
    last
      ? facts([
          ["By", h("code", {}, last.sweeper_id)],
          ["Took", took(last.took_sec * 1000)],
          ["Moved", movesOf(last) || "nothing"],
          [
            "Last moved something",
            active && h("span", {}, agoElement(active.at), `: ${movesOf(active)}`),
          ],
          ["Buried tasks", burials(active)],
          ["Failed jobs", failures(last.errors)],
        ])
      : empty(
          "Never swept.",
          "Nothing reclaims expired leases until a sweeper runs: microqueue sweep --every 5",
        ),
  );
}

/** Say in words what a sweep moved: "2 reclaimed, 1 buried". */
export function movesOf(report) {
  return MOVES.filter((name) => report[name] > 0)
    .map((name) => `${count(report[name], name, name)}`)
    .join(", ");
}

/** Name the tasks that the last sweep which moved something buried, by code. */
function burials(report) {
  const entries = Object.entries(report?.buried_tasks ?? {});
  if (!entries.length) return null;
  return h(
    "ul",
    {},
    entries.map(([code, { count: number, ids }]) =>
      h("li", {}, h("code", {}, code), ` ${number}: ${namesOf(ids, number)}`),
    ),
  );
}

function namesOf(ids, number) {
  const more = number - ids.length;
  return [...ids, ...(more > 0 ? [`${more} more`] : [])].join(", ");
}

function failures(errors) {
  const entries = Object.entries(errors ?? {});
  if (!entries.length) return null;
  return h(
    "ul",
    { class: "failures" },
    entries.map(([job, message]) => h("li", {}, h("code", {}, job), " ", message)),
  );
}
