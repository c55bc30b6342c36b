/* One schedule: when it runs next, its last run, its options and actions. */

import { fragment, h } from "../dom.js";
import { instant, number, period, readable } from "../format.js";
import { agoElement, untilElement } from "../ticker.js";
import { empty, facts, queueLink, stateBadge, taskLink } from "../components/common.js";
import { removeScheduleButton, scheduleActions } from "../components/schedule-actions.js";
import { View } from "./view.js";

const NEXT_RUNS = 5;
const MISSED = {
  latest: "run the latest one",
  all: "run all of them",
  skip: "skip them",
};

export class ScheduleView extends View {
  title = "Schedule";

  open(route) {
    if (String(this.route?.rest) !== String(route.rest)) this.data = null;
    super.open(route);
    this.title = `Schedule ${route.rest[1]}`;
  }

  async load() {
    const [queue, name] = this.route.rest;
    const path = `schedules/${encodeURIComponent(name)}`;
    try {
      const [schedule, { runs }] = await Promise.all([
        this.api.get(path, { queue }),
        this.api.get(`${path}/next`, { queue, n: NEXT_RUNS }),
      ]);
      return { schedule, runs };
    } catch (error) {
      if (error.status === 404) return { missing: true };
      throw error;
    }
  }

  render() {
    const { app, data } = this;
    const { schedule } = data ?? {};
    return fragment(
      h(
        "div",
        { class: "heading", key: "heading" },
        h("h1", {}, h("span", { class: "muted" }, "Schedule"), " ", this.route.rest[1]),
        schedule?.paused && h("span", { class: "badge badge-paused", key: "paused" }, "paused"),
        h(
          "div",
          { class: "actions" },
          schedule &&
            app.mayAct && [scheduleActions(app, schedule), removeScheduleButton(app, schedule)],
        ),
      ),
      data ? this.#content(data) : this.loading(),
    );
  }

  #content({ missing, schedule, runs }) {
    if (missing)
      return empty("no-such-schedule", "Schedule not found.", "It may have been removed.");
    return h(
      "div",
      { class: "columns task-columns", key: "columns" },
      h(
        "div",
        { class: "stack" },
        this.#nextRuns(schedule, runs),
        json("Payload", schedule.payload),
        Object.keys(schedule.headers).length > 0 && json("Headers", schedule.headers),
      ),
      h("div", { class: "stack" }, this.#runs(schedule), options(schedule)),
    );
  }

  #nextRuns(schedule, runs) {
    return h(
      "section",
      { class: "card panel", key: "next-runs", "data-part": "next-runs" },
      h(
        "header",
        {},
        h("h2", {}, "Next runs"),
        schedule.paused && h("span", { class: "muted", key: "paused" }, "when it is resumed"),
      ),
      runs.length
        ? h("ol", { class: "next-runs" }, runs.map(nextRun))
        : empty("no-next-runs", "It never runs again."),
    );
  }

  #runs(schedule) {
    const { last_run: last, last_skipped: skipped } = schedule;
    return h(
      "section",
      { class: "card panel", key: "runs", "data-part": "runs" },
      facts([
        ["Queue", queueLink(schedule.queue)],
        ["When", times(schedule)],
        ["Tasks added", number(schedule.runs)],
        ["Last run", last && lastRun(last)],
        ["Outcome", last && outcome(last)],
        ["Left out", skipped && leftOut(skipped)],
      ]),
    );
  }
}

/** When a schedule runs: its expression and time zone, or its period. */
export function times({ cron, every_sec: every, timezone }) {
  if (cron === null) return h("span", {}, `every ${period(every)}`);
  return h("span", {}, h("code", {}, cron), " ", h("span", { class: "muted" }, timezone));
}

/** The status of the task of a run, with a link to the task. */
export function outcome({ status, task_id: id }, text = id) {
  if (status === null) return h("span", { class: "muted" }, "deleted");
  return h("span", {}, stateBadge({ state: status }), " ", taskLink(id, id, text));
}

/** How late a run was, where that is worth a word. */
export function lateness({ late_sec: late, triggered }) {
  if (triggered) return "triggered";
  return late >= 1 ? `${period(Math.round(late))} late` : null;
}

function lastRun(last) {
  return h(
    "span",
    {},
    instant(last.fired_at),
    h("span", { class: "muted" }, " · ", agoElement(last.fired_at)),
    h("span", { class: "muted" }, ` · ${lateness(last) ?? "on time"}`),
  );
}

function leftOut({ at, reason }) {
  const why = reason === "late" ? "too late" : "a task was unfinished";
  return h("span", {}, instant(at), h("span", { class: "muted" }, ` · ${why}`));
}

/** A run as the viewer's clock shows it, and as that of the schedule's time zone if it differs. */
function nextRun(run) {
  const here = instant(run);
  const there = run.slice(0, 19).replace("T", " ");
  const offset = run.slice(19).replace(/^\.\d+/, "");
  return h(
    "li",
    { key: run },
    h("span", {}, here),
    h("span", { class: "muted" }, untilElement(run)),
    here !== there && h("span", { class: "muted" }, `${there} ${offset}`),
  );
}

function options(schedule) {
  const { backoff } = schedule;
  const waits = `${period(backoff.base_sec)} × ${backoff.factor}, at most ${period(backoff.max_sec)}`;
  const grace = schedule.catch_up === "skip" ? "1 m" : "no limit";
  return h(
    "section",
    { class: "card panel", key: "options", "data-part": "options" },
    facts([
      ["Task name", schedule.task && h("code", {}, schedule.task)],
      ["Missed runs", MISSED[schedule.catch_up]],
      ["Grace", schedule.grace_sec === null ? grace : period(schedule.grace_sec)],
      ["Overlap", schedule.overlap === "allow" ? "allowed" : "skip the run"],
      ["Jitter", schedule.jitter_sec ? `up to ${period(schedule.jitter_sec)}` : "none"],
      ["Priority", number(schedule.priority)],
      ["Max attempts", number(schedule.max_attempts)],
      ["Backoff", `${waits}, jitter ${backoff.jitter}`],
      ["Visibility timeout", given(schedule.visibility_timeout_sec) ?? "the worker's"],
      ["Expires in", given(schedule.expires_in_sec) ?? "never"],
      ["Source", schedule.source === "code" ? `code of app ${schedule.app}` : "made at run time"],
      ["Created", instant(schedule.created_at)],
      ["Changed", instant(schedule.updated_at)],
    ]),
  );
}

function given(seconds) {
  return seconds === null ? null : period(seconds);
}

function json(title, value) {
  return h(
    "section",
    { class: "card panel", key: title, "data-part": title.toLowerCase() },
    h("header", {}, h("h2", {}, title)),
    h("pre", { class: "json", tabindex: 0 }, readable(value)),
  );
}
