/* The schedules: when each runs, its last run and the outcome of that. */

import { fragment, h } from "../dom.js";
import { instant } from "../format.js";
import { href } from "../routes.js";
import { agoElement, untilElement } from "../ticker.js";
import { empty, queueLink } from "../components/common.js";
import { filterForm, queueSelect } from "../components/filter.js";
import { addScheduleButton, scheduleActions } from "../components/schedule-actions.js";
import { lateness, outcome, times } from "./schedule.js";
import { View } from "./view.js";

const COLUMNS = ["Schedule", "Queue", "Runs", "Next run", "Last run", "Outcome", ""];

export class SchedulesView extends View {
  title = "Schedules";

  load() {
    return this.api.get("schedules", { queue: this.query.queue });
  }

  render() {
    const { app, query } = this;
    return fragment(
      this.heading("Schedules", app.mayAct && addScheduleButton(app, query.queue)),
      filterForm(
        app,
        "schedules",
        query,
        h("label", { class: "inline-field", key: "queue" }, "Queue", queueSelect(app, query.queue)),
      ),
      this.data ? this.#table() : this.loading(),
    );
  }

  #table() {
    const { schedules } = this.data;
    if (!schedules.length)
      return empty(
        "no-schedules",
        "No schedules.",
        "A schedule adds a task at given times: by a cron expression, or every so often.",
      );
    return h(
      "div",
      { class: "card scrolls", key: "table" },
      h(
        "table",
        { class: "rows schedules" },
        h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", {}, name)))),
        h("tbody", {}, schedules.map((one) => this.#row(one))),
      ),
    );
  }

  #row(schedule) {
    const { name, queue, last_run: last, last_skipped: skipped } = schedule;
    return h(
      "tr",
      { key: JSON.stringify([queue, name]), "data-row": name },
      h(
        "td",
        { "data-label": "Schedule" },
        h("a", { class: "schedule-name", href: href(["schedules", queue, name]) }, name),
        about(schedule),
      ),
      h("td", { "data-label": "Queue" }, queueLink(queue)),
      h("td", { "data-label": "Runs" }, times(schedule)),
      h(
        "td",
        { "data-label": "Next run", class: "when" },
        schedule.next_at
          ? untilElement(schedule.next_at)
          : h("span", { class: "badge badge-paused" }, "paused"),
      ),
      h(
        "td",
        { "data-label": "Last run", class: "when" },
        last ? agoElement(last.fired_at) : "—",
        last && note(lateness(last), "late"),
      ),
      h(
        "td",
        { "data-label": "Outcome", "data-part": "outcome" },
        last ? outcome(last, "task") : "—",
        skipped &&
          note(
            skipped.reason === "late" ? "a run was missed" : "a run was left out: overlap",
            "skipped",
            instant(skipped.at),
          ),
      ),
      this.app.mayAct &&
        h(
          "td",
          { class: "row-actions" },
          h("div", { class: "actions" }, scheduleActions(this.app, schedule)),
        ),
    );
  }
}

/** The function that a schedule runs, if its name differs, and whether code declares it. */
function about({ name, task, source, app }) {
  const parts = [task !== name && task, source === "code" && `code of ${app}`].filter(Boolean);
  return note(parts.join(" · "), "about");
}

/** A second line in a cell; null without a text. */
function note(text, key, title = null) {
  return text ? h("span", { class: "muted cell-note", key, title }, text) : null;
}
