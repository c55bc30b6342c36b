/* The attempts of a task, the latest first, including the running one. */

import { h } from "../dom.js";
import { instant, number, took, toInstant } from "../format.js";
import { empty, errorText } from "./common.js";

const OUTCOME_LABELS = {
  done: "done",
  retried: "failed, retried",
  failed: "failed permanently",
  released: "released",
  snoozed: "snoozed",
  lease_expired: "lease expired",
  crashed: "worker crashed",
  cancelled: "cancelled",
};

export function timeline(task) {
  const attempts = [...(task.history ?? [])].reverse();
  const running = task.status === "processing";
  return h(
    "section",
    { class: "card panel", key: "timeline" },
    h("header", {}, h("h2", {}, "History")),
    attempts.length || running
      ? h(
          "ol",
          { class: "timeline" },
          running && current(task),
          attempts.map((one, index) => item(one, attempts.length - index)),
        )
      : empty("no-attempts", "No attempts yet."),
  );
}

function current(task) {
  return h(
    "li",
    { key: "running", class: "is-running" },
    h(
      "div",
      { class: "attempt-line" },
      h("strong", {}, `Attempt ${number(task.attempts)}`),
      h("span", {}, "running"),
    ),
    h(
      "div",
      { class: "muted" },
      instant(task.started_at),
      task.worker_id && h("code", {}, ` ${task.worker_id}`),
    ),
  );
}

function item(attempt, place) {
  const lasted = toInstant(attempt.ended_at) - toInstant(attempt.started_at);
  return h(
    "li",
    { key: `${place}`, class: `is-${attempt.outcome}` },
    h(
      "div",
      { class: "attempt-line" },
      h("strong", {}, `Attempt ${number(attempt.attempt)}`),
      h("span", { class: "outcome" }, OUTCOME_LABELS[attempt.outcome] ?? String(attempt.outcome)),
      h("span", { class: "muted" }, Number.isFinite(lasted) ? took(lasted) : ""),
    ),
    h(
      "div",
      { class: "muted" },
      instant(attempt.ended_at),
      attempt.worker_id && h("code", {}, ` ${attempt.worker_id}`),
    ),
    attempt.error && h("p", { class: "attempt-error" }, errorText(attempt.error)),
  );
}
