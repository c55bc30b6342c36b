/* What the buttons of a queue do. What holds others up asks first. */

import { h } from "../dom.js";
import { number, pretty } from "../format.js";
import {
  confirmFirst,
  durationField,
  field,
  openForm,
  readDuration,
  readPayload,
} from "./dialog.js";
import { button } from "./pieces.js";
import { movesOf } from "./sweeper.js";

/** Buttons of a queue: hold it, let it go on, try its next task by hand. */
export function queueActions(queue, app) {
  const name = queue.queue;
  return [
    ...processNext(name, app, { disabled: queue.paused || queue.ready === 0 }),
    app.config.can_pause &&
      (queue.paused
        ? button("Resume", () => resume(name, app), { key: "resume" })
        : button("Pause", () => pause(name, app), { key: "pause" })),
  ];
}

/** "Process & succeed" and "Process & fail" for the next task of a queue. */
export function processNext(queue, app, attributes = {}) {
  const settle = (how, word) => () =>
    app.attempt(
      () => app.api.post(`queues/${encodeURIComponent(queue)}/${how}-next`),
      (task) => `Task ${task.id} was processed and ${word}: it is ${task.state} now.`,
    );
  const about = `Pop the next task of ${queue} and settle it, as a worker would`;
  return [
    button("Process & succeed", settle("succeed", "succeeded"), {
      key: "succeed",
      title: about,
      ...attributes,
    }),
    button("Process & fail", settle("fail", "failed"), {
      key: "fail",
      title: about,
      ...attributes,
    }),
  ];
}

export function sweepNow(app) {
  return app.attempt(
    () => app.api.post("sweeper/run"),
    (report) =>
      report.skipped
        ? "Another sweeper is at it."
        : `Swept: ${movesOf(report) || "nothing to move"}.`,
  );
}

function pause(queue, app) {
  confirmFirst({
    title: `Pause ${queue}?`,
    explanation: "Workers finish what they hold and take nothing new until it is resumed.",
    action: "Pause",
    perform: () =>
      app.act(
        () => app.api.post(`queues/${encodeURIComponent(queue)}/pause`),
        `${queue} is paused.`,
      ),
  });
}

function resume(queue, app) {
  return app.attempt(
    () => app.api.post(`queues/${encodeURIComponent(queue)}/resume`),
    `${queue} goes on.`,
  );
}

/** Ask for a payload and options, and enqueue it. */
export function askToEnqueue(app, queue = app.config.queue) {
  openForm({
    title: "Enqueue a task",
    action: "Enqueue",
    wide: true,
    fields: [
      field(
        "Queue",
        h("input", {
          name: "queue",
          value: queue,
          required: true,
          list: "queue-names",
          autocomplete: "off",
        }),
      ),
      h(
        "datalist",
        { id: "queue-names" },
        (app.overview?.queues ?? []).map((one) => h("option", { value: one.queue })),
      ),
      field(
        "Payload",
        h(
          "textarea",
          { name: "payload", rows: 8, spellcheck: "false", class: "code-input" },
          pretty({}),
        ),
      ),
      h(
        "div",
        { class: "field-row" },
        field(
          "Priority",
          h("input", { name: "priority", type: "number", min: 0, max: 255, value: 0 }),
        ),
        field("Delay", durationField("delay")),
        field(
          "Attempts at most",
          h("input", {
            name: "max_attempts",
            type: "number",
            min: 1,
            placeholder: number(app.config.max_attempts),
          }),
        ),
        field("Dedupe key", h("input", { name: "dedupe_key" })),
      ),
    ],
    submit: (data) =>
      app.act(
        () =>
          app.api.post("tasks", {
            queue: data.get("queue"),
            payload: readPayload(data.get("payload")),
            priority: Number(data.get("priority") || 0),
            delay_sec: readDuration(data, "delay"),
            max_attempts: data.get("max_attempts") ? Number(data.get("max_attempts")) : null,
            dedupe_key: data.get("dedupe_key") || null,
          }),
        (task) => `Task ${task.id} is ${task.state}.`,
      ),
  });
}
