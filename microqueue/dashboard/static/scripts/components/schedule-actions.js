/* Actions on schedules: add, edit, run now, pause, resume, remove. */

import { h } from "../dom.js";
import { pretty } from "../format.js";
import { href } from "../routes.js";
import { toast } from "./toast.js";
import { button } from "./common.js";
import {
  FormError,
  confirmAction,
  durationField,
  field,
  jsonField,
  moreOptions,
  openForm,
  readDuration,
  readNumber,
  readObjects,
  selectField,
  textInput,
} from "./dialog.js";

const CATCH_UPS = [
  ["latest", "Run the latest"],
  ["all", "Run all"],
  ["skip", "Skip them"],
];
const OVERLAPS = [
  ["allow", "Run anyway"],
  ["skip", "Skip the run"],
];
const JITTERS = ["none", "full", "equal", "decorrelated", "additive"].map((name) => [name, name]);

export function addScheduleButton(app, queue = app.config.queue) {
  return button("Add a schedule…", () => openForm(scheduleForm(app, { queue })), {
    kind: "primary",
    key: "add-schedule",
  });
}

/** The buttons in the row of a schedule. */
export function scheduleActions(app, schedule) {
  const { name, queue, paused } = schedule;
  const post = (verb, success) => () =>
    app.actOrReport(() => app.api.post(address(name, verb), { queue }), success);
  return [
    button(
      "Run now",
      post("trigger", ({ task_id: id }) => `Task ${id} added.`),
      { key: "trigger" },
    ),
    paused
      ? button("Resume", post("resume", `Schedule ${name} resumed.`), { key: "resume-schedule" })
      : button("Pause", post("pause", `Schedule ${name} paused.`), { key: "pause-schedule" }),
    button("Edit…", () => edit(app, name, queue), { key: "edit-schedule" }),
  ];
}

/** The button on the page of a schedule that removes it. */
export function removeScheduleButton(app, schedule) {
  const { name, queue } = schedule;
  return button(
    "Remove…",
    () =>
      confirmAction({
        title: `Remove schedule ${name}?`,
        explanation:
          schedule.source === "code"
            ? `The code of app ${schedule.app} declares it: the next worker that starts adds it again. To stop it, pause it instead.`
            : `It adds no more tasks to queue ${queue}. Tasks that it added stay.`,
        action: "Remove",
        perform: async () => {
          await app.api.post(address(name, "remove"), { queue });
          toast(`Schedule ${name} removed.`);
          app.go(href("schedules"));
        },
      }),
    { kind: "danger", key: "remove-schedule" },
  );
}

/** Open the form with the options that the schedule has now, not those that the page shows. */
async function edit(app, name, queue) {
  const schedule = await app.requestOrReport(() => app.api.get(address(name), { queue }));
  if (schedule) openForm(scheduleForm(app, schedule, { existing: true }));
}

/** The form of a new schedule, or of an existing one. */
function scheduleForm(app, schedule, { existing = false } = {}) {
  const { queue } = schedule;
  return {
    title: existing ? `Edit schedule ${schedule.name}` : "Add a schedule",
    action: "Save",
    wide: true,
    fields: [
      schedule.source === "code" &&
        h(
          "p",
          { class: "warning" },
          `The code of app ${schedule.app} declares this schedule. After you save it, the code no longer changes it. To give it back to the code, remove it.`,
        ),
      h(
        "div",
        { class: "field-row" },
        !existing && nameFields(app, queue),
        field(
          "Task name",
          textInput("task", { value: schedule.task, maxlength: 120 }),
          "The function to run.",
          "task",
        ),
      ),
      h(
        "div",
        { class: "field-row" },
        field(
          "Cron expression",
          textInput("cron", { value: schedule.cron, maxlength: 255, placeholder: "0 3 * * *" }),
          "Minute, hour, day, month, weekday.",
          "cron",
        ),
        field(
          "Time zone",
          textInput("timezone", { value: schedule.timezone ?? "UTC", maxlength: 120 }),
          "Such as Europe/Berlin.",
          "timezone",
        ),
        field(
          "Or every",
          durationField("every", { seconds: schedule.every_sec ?? null }),
          "A period instead of an expression.",
          "every_sec",
        ),
      ),
      jsonField("Payload", "payload", pretty(schedule.payload ?? {}), {
        rows: 4,
        hint: keepHint(app, schedule.payload),
      }),
      moreOptions(
        timingFields(schedule),
        deliveryFields(app, schedule),
        jsonField("Headers", "headers", pretty(schedule.headers ?? {}), {
          rows: 2,
          hint: keepHint(app, schedule.headers),
        }),
      ),
    ],
    submit: async (data) => {
      const name = existing ? schedule.name : data.get("name");
      const body = read(data, existing ? queue : data.get("queue"));
      if (!existing) await checkNew(app, name, body.queue);
      return app.act(() => app.api.post(address(name, "put"), body), `Schedule ${name} saved.`);
    },
  };
}

function nameFields(app, queue) {
  return [
    field("Name", textInput("name", { required: true, maxlength: 120 }), null, "name"),
    field(
      "Queue",
      textInput("queue", { value: queue, required: true, maxlength: 120, list: "queue-names" }),
      null,
      "queue",
    ),
    h(
      "datalist",
      { id: "queue-names" },
      (app.overview?.queues ?? []).map((one) => h("option", { value: one.queue })),
    ),
  ];
}

function keepHint({ config: { mask } }, shown = {}) {
  const masked = JSON.stringify(shown).includes(mask);
  return masked ? `Leave ${mask} to keep the stored value.` : null;
}

function timingFields(schedule) {
  return h(
    "div",
    { class: "field-row" },
    field(
      "Missed runs",
      selectField("catch_up", CATCH_UPS, schedule.catch_up ?? "latest"),
      "After an outage.",
      "catch_up",
    ),
    field(
      "Grace",
      durationField("grace", { seconds: schedule.grace_sec ?? null }),
      "Leave out later runs.",
      "grace_sec",
    ),
    field(
      "Overlap",
      selectField("overlap", OVERLAPS, schedule.overlap ?? "allow"),
      "While a task of it is unfinished.",
      "overlap",
    ),
    field(
      "Jitter",
      durationField("jitter", { seconds: schedule.jitter_sec ?? null, unit: 1 }),
      "Deliver up to this much later.",
      "jitter_sec",
    ),
  );
}

function deliveryFields(app, schedule) {
  return [
    h(
      "div",
      { class: "field-row" },
      field("Priority", numberInput("priority", schedule.priority ?? 0, { max: 255 }), null, "priority"),
      field(
        "Max attempts",
        numberInput("max_attempts", schedule.max_attempts ?? app.config.max_attempts, { min: 1 }),
        null,
        "max_attempts",
      ),
      field(
        "Expires in",
        durationField("expires_in", { seconds: schedule.expires_in_sec ?? null }),
        null,
        "expires_in_sec",
      ),
      field(
        "Visibility timeout",
        durationField("visibility_timeout", { seconds: schedule.visibility_timeout_sec ?? null }),
        null,
        "visibility_timeout_sec",
      ),
    ),
    backoffFields(schedule.backoff ?? app.config.backoff),
  ];
}

function backoffFields(policy) {
  return h(
    "fieldset",
    { class: "field", "data-field": "backoff" },
    h("legend", { class: "field-label" }, "Backoff between attempts, in seconds"),
    h(
      "div",
      { class: "field-row" },
      field("Base", numberInput("base_sec", policy.base_sec, { step: "any" })),
      field("Factor", numberInput("factor", policy.factor, { min: 1, step: "any" })),
      field("Max", numberInput("max_sec", policy.max_sec, { step: "any" })),
      field("Jitter", selectField("backoff_jitter", JITTERS, policy.jitter)),
    ),
    h("span", { class: "field-note", role: "alert", hidden: true }),
  );
}

function numberInput(name, value, attributes = {}) {
  return h("input", { name, type: "number", min: 0, value, required: true, ...attributes });
}

function read(data, queue) {
  return {
    queue,
    task: data.get("task").trim() || null,
    cron: data.get("cron").trim() || null,
    every_sec: readDuration(data, "every"),
    timezone: data.get("timezone").trim() || "UTC",
    ...readObjects(data, "payload", "headers"),
    catch_up: data.get("catch_up"),
    grace_sec: readDuration(data, "grace"),
    overlap: data.get("overlap"),
    jitter_sec: readDuration(data, "jitter"),
    priority: readNumber(data, "priority"),
    max_attempts: readNumber(data, "max_attempts"),
    expires_in_sec: readDuration(data, "expires_in"),
    visibility_timeout_sec: readDuration(data, "visibility_timeout"),
    backoff: {
      base_sec: readNumber(data, "base_sec"),
      factor: readNumber(data, "factor"),
      max_sec: readNumber(data, "max_sec"),
      jitter: data.get("backoff_jitter"),
    },
  };
}

/** Reject the name of a schedule that exists: saving would replace its options. */
async function checkNew(app, name, queue) {
  const { schedules } = await app.api.get("schedules", { queue });
  if (!schedules.some((one) => one.name === name)) return;
  const message = `Queue ${queue} has a schedule with this name. Edit that one, or choose another name.`;
  throw new FormError([{ path: "name", message }]);
}

function address(name, verb = null) {
  return ["schedules", name, verb].filter(Boolean).map(encodeURIComponent).join("/");
}
