/* Actions on queues: enqueue, pause, resume, sweep, mark the next task. */

import { h } from "../dom.js";
import { pretty } from "../format.js";
import {
  FormError,
  confirmAction,
  deliveryFields,
  field,
  durationField,
  jsonField,
  moreOptions,
  openForm,
  readDuration,
  readNumber,
  readObjects,
  selectField,
  textInput,
} from "./dialog.js";
import { button } from "./common.js";
import { describeChanges } from "./sweeper.js";

/** A queue's buttons: pause or resume, and with manual actions, mark its next task. */
export function queueActions(queue, app) {
  const name = queue.queue;
  return [
    ...markNextButtons(name, app, { disabled: queue.paused || queue.ready === 0 }),
    app.config.can_pause &&
      (queue.paused
        ? button("Resume", () => resume(name, app), { key: "resume" })
        : button("Pause", () => pause(name, app), { key: "pause" })),
  ];
}

/** What marking a task does; no worker runs it. */
export const OUTCOMES = {
  succeed: {
    word: "done",
    effect: "It is stored as done. No worker runs it, and it is not retried.",
  },
  fail: {
    word: "failed",
    effect:
      "The attempt counts as failed: the task is retried after its backoff, or becomes a dead letter if this was its last attempt. No worker runs it.",
  },
};

/** Buttons that mark the next task of a queue; none without manual actions. */
export function markNextButtons(queue, app, attributes = {}) {
  if (!app.config.manual_actions) return [];
  return Object.entries(OUTCOMES).map(([verb, { word, effect }]) =>
    button(
      `Mark next as ${word}…`,
      () =>
        confirmAction({
          title: `Mark the next task of ${queue} as ${word}?`,
          explanation: `The dashboard claims the next ready task of queue ${queue}. ${effect}`,
          action: `Mark as ${word}`,
          perform: () =>
            app.act(
              () => app.api.post(`queues/${encodeURIComponent(queue)}/${verb}-next`),
              (task) => `Task ${task.id} marked as ${word}; it is now ${task.state}.`,
            ),
        }),
      { key: `${verb}-next`, ...attributes },
    ),
  );
}

/** What becomes of a task whose id or dedupe key another one has. */
const DUPLICATES = [
  ["raise", "Show an error"],
  ["return", "Keep it, add nothing"],
  ["replace", "Replace it, if it waits"],
];

export function sweepNow(app) {
  return app.actOrReport(
    () => app.api.post("sweeper/run"),
    (report) =>
      report.skipped
        ? "Another sweeper is running."
        : `Swept: ${describeChanges(report) || "no changes"}.`,
  );
}

function pause(queue, app) {
  confirmAction({
    title: `Pause queue ${queue}?`,
    explanation: "Workers finish their running tasks and claim no more until the queue is resumed.",
    action: "Pause",
    perform: () =>
      app.act(
        () => app.api.post(`queues/${encodeURIComponent(queue)}/pause`),
        `Queue ${queue} paused.`,
      ),
  });
}

function resume(queue, app) {
  return app.actOrReport(
    () => app.api.post(`queues/${encodeURIComponent(queue)}/resume`),
    `Queue ${queue} resumed.`,
  );
}

/** Open the form that enqueues a task. */
export function openEnqueueForm(app, queue = app.config.queue) {
  const suggestions = h("datalist", { id: "task-names" });
  const served = app.api.get("task-names").catch(() => null); // Suggestions are optional.
  const suggest = async () => {
    const names = namesOf(await served, form.elements.queue.value);
    suggestions.replaceChildren(...names.known.map((value) => h("option", { value })));
  };
  let confirmedWarning = null;
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
          textInput("queue", {
            value: queue,
            required: true,
            maxlength: 120,
            list: "queue-names",
            oninput: suggest,
          }),
          null,
          "queue",
        ),
        field(
          "Task name",
          textInput("name", { maxlength: 120, list: "task-names" }),
          "Leave empty for workers with a single handler.",
          "name",
        ),
      ),
      h(
        "datalist",
        { id: "queue-names" },
        (app.overview?.queues ?? []).map((one) => h("option", { value: one.queue })),
      ),
      suggestions,
      jsonField("Payload", "payload", pretty({}), { rows: 6 }),
      jsonField("Headers", "headers", pretty({}), { rows: 2 }),
      h("div", { class: "field-row" }, deliveryFields(app)),
      moreOptions(
        h(
          "div",
          { class: "field-row" },
          field(
            "Dedupe key",
            textInput("dedupe_key", { maxlength: 1024 }),
            "No second task while one with this key is unfinished.",
            "dedupe_key",
          ),
          field(
            "Keep the key for",
            durationField("dedupe_for"),
            "Also after the task is finished.",
            "dedupe_for_sec",
          ),
        ),
        h(
          "div",
          { class: "field-row" },
          field("Task id", textInput("task_id"), "Leave empty for a new ObjectId.", "task_id"),
          field(
            "If the task exists",
            selectField("on_duplicate", DUPLICATES, "raise"),
            "A task with this id, or an unfinished one with this key.",
            "on_duplicate",
          ),
        ),
        h(
          "div",
          { class: "field-row" },
          field(
            "Expires in",
            durationField("expires_in"),
            "Fail the task if it still waits then.",
            "expires_in_sec",
          ),
          field(
            "Visibility timeout",
            durationField("visibility_timeout"),
            "Leave empty for the worker's setting.",
            "visibility_timeout_sec",
          ),
        ),
      ),
    ],
    submit: async (data) => {
      const objects = readObjects(data, "payload", "headers");
      const chosen = data.get("queue");
      const name = data.get("name").trim() || null;
      const warning = nameWarning(await served, chosen, name ?? objects.headers.task);
      if (warning && confirmedWarning !== warning) {
        confirmedWarning = warning;
        throw new FormError([{ path: "name", message: warning }], "Enqueue anyway");
      }
      await app.act(
        () =>
          app.api.post("tasks", {
            queue: chosen,
            name,
            ...objects,
            priority: readNumber(data, "priority") ?? 0,
            delay_sec: readDuration(data, "delay"),
            max_attempts: readNumber(data, "max_attempts"),
            dedupe_key: data.get("dedupe_key") || null,
            dedupe_for_sec: readDuration(data, "dedupe_for"),
            task_id: data.get("task_id").trim() || null,
            on_duplicate: data.get("on_duplicate"),
            expires_in_sec: readDuration(data, "expires_in"),
            visibility_timeout_sec: readDuration(data, "visibility_timeout"),
          }),
        (task) => enqueued(task, data.get("on_duplicate")),
      );
    },
  });
  suggest();
}

function enqueued({ id, queue, state, is_duplicate: existed }, choice) {
  if (existed && choice === "return") return `Task ${id} exists already; nothing was enqueued.`;
  return `Task ${id} ${existed ? "replaced" : "enqueued"} in ${queue}; it is ${state}.`;
}

/** The task names known for a queue, whether it has workers, and whether these accept any name. */
function namesOf(reply, queue) {
  const here = reply?.queues.find((one) => one.queue === queue);
  return {
    known: [...new Set([...(here?.names ?? []), ...(reply?.known ?? [])])].sort(),
    served: here !== undefined,
    any: !reply || (here?.any_name ?? false),
  };
}

/** Why the workers of a queue may not run a task; null if they may. */
function nameWarning(reply, queue, name) {
  const { known, served, any } = namesOf(reply, queue);
  if (any || known.includes(name)) return null;
  if (name)
    return `No worker of ${queue} has registered the task name ${name}. Attempts fail until one does.`;
  return served
    ? `The workers of ${queue} run named tasks only. A task without a name fails.`
    : null;
}
