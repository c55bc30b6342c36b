/* The last sweep: when, by which sweeper, and what it changed. */

import { h } from "../dom.js";
import { count, took } from "../format.js";
import { agoElement } from "../ticker.js";
import { empty, facts } from "./common.js";

const CHANGES = ["reclaimed", "promoted", "buried", "expired", "purged", "moved", "fired"];

export function sweeperPanel({ last_sweep: last, last_active_sweep: active }) {
  return h(
    "section",
    { class: "card panel sweeper", key: "sweeper" },
    h(
      "header",
      {},
      h("h2", {}, "Sweeper"),
      last && h("span", { class: "muted" }, "last run ", agoElement(last.at)),
    ),
    last
      ? facts([
          ["Sweeper ID", h("code", {}, last.sweeper_id)],
          ["Duration", took(last.took_sec * 1000)],
          ["Changes", describeChanges(last) || "none"],
          [
            "Last change",
            active && h("span", {}, agoElement(active.at), `: ${describeChanges(active)}`),
          ],
          ["Buried tasks", buriedTasks(active)],
          ["Job errors", jobErrors(last.errors)],
        ])
      : empty(
          "never-swept",
          "No sweep yet.",
          "Expired leases are reclaimed once a sweeper runs: microqueue sweep --every 5",
        ),
  );
}

/** Describe what a sweep changed: "2 reclaimed, 1 buried"; empty if nothing. */
export function describeChanges(report) {
  return CHANGES.filter((name) => report[name] > 0)
    .map((name) => `${count(report[name], name, name)}`)
    .join(", ");
}

/** List the tasks that a sweep buried, by code. */
function buriedTasks(report) {
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

function jobErrors(errors) {
  const entries = Object.entries(errors ?? {});
  if (!entries.length) return null;
  return h(
    "ul",
    { class: "failures" },
    entries.map(([job, message]) => h("li", {}, h("code", {}, job), " ", message)),
  );
}
