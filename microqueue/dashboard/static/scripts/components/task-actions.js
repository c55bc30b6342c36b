/* Actions on one task. Destructive ones ask for confirmation. */

import { pretty } from "../format.js";
import { href } from "../routes.js";
import {
  confirmAction,
  durationField,
  field,
  jsonField,
  openForm,
  readDuration,
  readObjects,
} from "./dialog.js";
import { button } from "./common.js";
import { OUTCOMES } from "./queue-actions.js";

/** A task's id for the API: the number, or the reference, which is unambiguous. */
export function selectionId({ id, reference }) {
  return typeof id === "number" ? id : reference;
}

/** Buttons for the actions that the server allows for a task. */
export function taskActions(task, app) {
  if (!app.mayAct) return [];
  return Object.entries(TASK_ACTIONS)
    .filter(([name]) => task.actions.includes(name))
    .map(([name, { label, kind, perform }]) =>
      button(label, () => perform(task, app), { kind, key: name }),
    );
}

const TASK_ACTIONS = {
  retry: {
    label: "Run now",
    kind: "primary",
    perform: (task, app) => actOrReport(task, app, "retry", "is ready"),
  },
  release: {
    label: "Release…",
    perform: (task, app) =>
      confirmAction({
        title: "Release this task?",
        explanation:
          "The task becomes ready again, and the attempt is refunded. Its worker loses the lease; work that it still does may be done twice.",
        action: "Release",
        perform: () => act(task, app, "release", "released"),
      }),
  },
  succeed: { label: "Mark as done…", perform: (task, app) => mark(task, app, "succeed") },
  fail: { label: "Mark as failed…", perform: (task, app) => mark(task, app, "fail") },
  replay: { label: "Replay", kind: "primary", perform: (task, app) => replay(task, app) },
  edit: { label: "Edit and replay…", perform: (task, app) => editAndReplay(task, app) },
  cancel: {
    label: "Cancel…",
    kind: "danger",
    perform: (task, app) =>
      confirmAction({
        title: "Cancel this task?",
        explanation:
          task.status === "processing"
            ? "Its handler is notified, and its result is discarded. The task becomes a dead letter with code cancelled."
            : "It will not run. It becomes a dead letter with code cancelled.",
        action: "Cancel task",
        dismiss: "Keep task",
        perform: () => act(task, app, "cancel", "cancelled"),
      }),
  },
  discard: {
    label: "Discard…",
    kind: "danger",
    perform: (task, app) =>
      confirmAction({
        title: "Discard this dead letter?",
        explanation: "It is deleted permanently.",
        action: "Discard",
        perform: async () => {
          await app.act(
            () =>
              app.api.post("dead-letters/discard", {
                queue: task.queue,
                ids: [selectionId(task)],
                dry_run: false,
              }),
            `Task ${task.id} discarded.`,
          );
          app.go(href("dead-letters", { queue: task.queue }));
        },
      }),
  },
};

function mark(task, app, verb) {
  const { word, effect } = OUTCOMES[verb];
  return confirmAction({
    title: `Mark this task as ${word}?`,
    explanation: `The dashboard claims task ${task.id} of queue ${task.queue}. ${effect}`,
    action: `Mark as ${word}`,
    perform: () => act(task, app, verb, `marked as ${word}`),
  });
}

function act(task, app, verb, result) {
  return app.act(
    () => app.api.post(`tasks/${encodeURIComponent(task.reference)}/${verb}`),
    `Task ${task.id} ${result}.`,
  );
}

function actOrReport(task, app, verb, result) {
  return app.actOrReport(
    () => app.api.post(`tasks/${encodeURIComponent(task.reference)}/${verb}`),
    `Task ${task.id} ${result}.`,
  );
}

function replay(task, app) {
  return app.actOrReport(
    () =>
      app.api.post("dead-letters/replay", {
        queue: task.queue,
        ids: [selectionId(task)],
        dry_run: false,
      }),
    ({ replayed }) =>
      replayed
        ? `Task ${task.id} replayed.`
        : `Task ${task.id} not replayed: it changed, or its dedupe key is in use.`,
  );
}

/** Open the form that edits a dead letter's payload and replays it. */
export function editAndReplay(task, app) {
  openForm({
    title: "Edit and replay",
    action: "Replay",
    wide: true,
    fields: [
      jsonField("Payload", "payload", pretty(task.payload), {
        rows: 14,
        hint: app.config.redacts ? `Leave ${app.config.mask} to keep a stored value.` : null,
      }),
      field("Delay", durationField("delay"), "Leave empty to replay now."),
    ],
    submit: (data) =>
      app.act(
        () =>
          app.api.post(`dead-letters/${encodeURIComponent(task.reference)}/edit-and-replay`, {
            ...readObjects(data, "payload"),
            delay_sec: readDuration(data, "delay") ?? 0,
          }),
        `Task ${task.id} replayed with the new payload.`,
      ),
  });
}
