/* What the buttons of a queue do. What holds others up asks first. */

import { h } from "../dom.js";
import { number, pretty } from "../format.js";
import {
  FormProblem,
  confirmFirst,
  durationField,
  field,
  jsonField,
  openForm,
  readDuration,
  readObjects,
} from "./dialog.js";
import { button } from "./pieces.js";
import { movesOf } from "./sweeper.js";

/** Buttons of a queue: hold it, let it go on, and where it is allowed, settle its next task. */
export function queueActions(queue, app) {
  const name = queue.queue;
  return [
    ...markNext(name, app, { disabled: queue.paused || queue.ready === 0 }),
    app.config.can_pause &&
      (queue.paused
        ? button("Resume", () => resume(name, app), { key: "resume" })
        : button("Pause", () => pause(name, app), { key: "pause" })),
  ];
}

/** What becomes of a task that is settled by hand; no worker runs it. */
export const OUTCOMES = {
  succeed: {
    word: "done",
    effect: "It is stored as done. No worker runs it, and it is not retried.",
  },
  fail: {
    word: "failed",
    effect:
      "Its attempt counts as failed: it is retried after its backoff, or is a dead letter if that was its last attempt. No worker runs it.",
  },
};

/** Buttons that settle the next task of a queue by hand, where the dashboard allows that. */
export function markNext(queue, app, attributes = {}) {
  if (!app.config.manual_actions) return [];
  return Object.entries(OUTCOMES).map(([verb, { word, effect }]) =>
    button(
      `Mark next as ${word}…`,
      () =>
        confirmFirst({
          title: `Mark the next task of ${queue} as ${word}?`,
          explanation: `The next ready task of the queue ${queue} is taken from its workers. ${effect}`,
          action: `Mark as ${word}`,
          perform: () =>
            app.act(
              () => app.api.post(`queues/${encodeURIComponent(queue)}/${verb}-next`),
              (task) => `Task ${task.id} was marked as ${word}: it is ${task.state} now.`,
            ),
        }),
      { key: verb, ...attributes },
    ),
  );
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

/** Ask for a name, a payload and options, and enqueue it. */
export function askToEnqueue(app, queue = app.config.queue) {
  const suggestions = h("datalist", { id: "task-names" });
  const served = app.api.get("task-names").catch(() => null); // It only helps.
  const suggest = async () => {
    const names = namesOf(await served, form.elements.queue.value);
    suggestions.replaceChildren(...names.known.map((value) => h("option", { value })));
  };
  let considered = null;
  const { form } = openForm({
    title: "Enqueue a task",
    action: "Enqueue",
    wide: true,
    fields: [
      h(
        "div",
        { class: "field-row" },
        field(
          "Queue",
          h("input", {
            name: "queue",
            value: queue,
            required: true,
            maxlength: 120,
            list: "queue-names",
            autocomplete: "off",
            oninput: suggest,
          }),
          null,
          "queue",
        ),
        field(
          "Task name",
          h("input", { name: "name", maxlength: 120, list: "task-names", autocomplete: "off" }),
          "Empty: for workers with one handler for all.",
          "name",
        ),
      ),
      h(
        "datalist",
        { id: "queue-names" },
        (app.overview?.queues ?? []).map((one) => h("option", { value: one.queue })),
      ),
      suggestions,
      jsonField("Payload", "payload", pretty({})),
      jsonField("Headers", "headers", pretty({}), { rows: 2 }),
      h(
        "div",
        { class: "field-row" },
        field(
          "Priority",
          h("input", { name: "priority", type: "number", min: 0, max: 255, value: 0 }),
          null,
          "priority",
        ),
        field("Delay", durationField("delay"), null, "delay_sec"),
        field(
          "Max attempts",
          h("input", {
            name: "max_attempts",
            type: "number",
            min: 1,
            placeholder: number(app.config.max_attempts),
          }),
          null,
          "max_attempts",
        ),
        field(
          "Dedupe key",
          h("input", { name: "dedupe_key", maxlength: 1024 }),
          null,
          "dedupe_key",
        ),
      ),
    ],
    submit: async (data) => {
      const objects = readObjects(data, "payload", "headers");
      const chosen = data.get("queue");
      const name = data.get("name").trim() || null;
      const doubt = doubtOf(await served, chosen, name ?? objects.headers.task);
      if (doubt && considered !== doubt) {
        considered = doubt;
        throw new FormProblem([{ path: "name", message: doubt }], "Enqueue anyway");
      }
      await app.act(
        () =>
          app.api.post("tasks", {
            queue: chosen,
            name,
            ...objects,
            priority: Number(data.get("priority") || 0),
            delay_sec: readDuration(data, "delay"),
            max_attempts: data.get("max_attempts") ? Number(data.get("max_attempts")) : null,
            dedupe_key: data.get("dedupe_key") || null,
          }),
        (task) => `Task ${task.id} is ${task.state} in ${task.queue}.`,
      );
    },
  });
  suggest();
}

/** The names that can be enqueued to a queue, and whether others may be served, too. */
function namesOf(reply, queue) {
  const here = reply?.queues.find((one) => one.queue === queue);
  return {
    known: [...new Set([...(here?.names ?? []), ...(reply?.known ?? [])])].sort(),
    served: here !== undefined,
    any: !reply || (here?.any_name ?? false),
  };
}

/** Why a task may not be run by the workers of its queue; null if nothing speaks against it. */
function doubtOf(reply, queue, name) {
  const { known, served, any } = namesOf(reply, queue);
  if (any || known.includes(name)) return null;
  if (name)
    return `No worker of ${queue} has registered the name ${name}. Until one does, its attempts fail.`;
  return served ? `The workers of ${queue} serve named tasks only. Without a name it fails.` : null;
}
