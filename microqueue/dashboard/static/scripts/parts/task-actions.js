/* What the buttons of a task do. What destroys asks first. */

import { pretty } from "../format.js";
import { href } from "../routes.js";
import {
  confirmFirst,
  durationField,
  field,
  jsonField,
  openForm,
  readDuration,
  readObjects,
} from "./dialog.js";
import { button } from "./pieces.js";
import { OUTCOMES } from "./queue-actions.js";

/** A task's id as a selection takes it: a number, or text that means no other task. */
export function selectionId({ id, reference }) {
  return typeof id === "number" ? id : reference;
}

/** The buttons that fit a task's status, as the server names them. */
export function taskActions(task, app) {
  if (!app.mayAct) return [];
  return task.actions
    .filter((name) => TASK_ACTIONS[name])
    .map((name) => {
      const { label, kind, perform } = TASK_ACTIONS[name];
      return button(label, () => perform(task, app), { kind, key: name });
    });
}

const TASK_ACTIONS = {
  retry: {
    label: "Retry now",
    kind: "primary",
    perform: (task, app) => post(task, app, "retry", "is ready"),
  },
  release: {
    label: "Release…",
    perform: (task, app) =>
      confirmFirst({
        title: "Take this task from its worker?",
        explanation:
          "It goes back to wait, with its attempt refunded. Its worker loses the lease, and what it still does may happen twice.",
        action: "Release",
        perform: () => act(task, app, "release", "was released"),
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
      confirmFirst({
        title: "Cancel this task?",
        explanation: "It will not run. It becomes a dead letter with code cancelled.",
        action: "Cancel the task",
        perform: () => act(task, app, "cancel", "is cancelled"),
      }),
  },
  discard: {
    label: "Discard…",
    kind: "danger",
    perform: (task, app) =>
      confirmFirst({
        title: "Discard this dead letter?",
        explanation: "It is deleted for good.",
        action: "Discard",
        perform: async () => {
          await app.act(
            () =>
              app.api.post("dead-letters/discard", {
                queue: task.queue,
                ids: [selectionId(task)],
                dry_run: false,
              }),
            `Task ${task.id} is discarded.`,
          );
          app.go(href("dead-letters", { queue: task.queue }));
        },
      }),
  },
};

function mark(task, app, verb) {
  const { word, effect } = OUTCOMES[verb];
  return confirmFirst({
    title: `Mark this task as ${word}?`,
    explanation: `The task ${task.id} of the queue ${task.queue} is taken from its workers. ${effect}`,
    action: `Mark as ${word}`,
    perform: () => act(task, app, verb, `was marked as ${word}`),
  });
}

function act(task, app, verb, result) {
  return app.act(
    () => app.api.post(`tasks/${encodeURIComponent(task.reference)}/${verb}`),
    `Task ${task.id} ${result}.`,
  );
}

function post(task, app, verb, result) {
  return app.attempt(
    () => app.api.post(`tasks/${encodeURIComponent(task.reference)}/${verb}`),
    `Task ${task.id} ${result}.`,
  );
}

function replay(task, app) {
  return app.attempt(
    () =>
      app.api.post("dead-letters/replay", { queue: task.queue, ids: [selectionId(task)], dry_run: false }),
    ({ replayed }) =>
      replayed
        ? `Task ${task.id} waits again.`
        : "Nothing was replayed: the task changed, or its dedupe key is in use.",
  );
}

/** Open a dead letter's payload for editing, and replay it changed. */
export function editAndReplay(task, app) {
  openForm({
    title: "Edit and replay",
    action: "Replay",
    wide: true,
    fields: [
      jsonField("Payload", "payload", pretty(task.payload), {
        rows: 14,
        hint: app.config.redacts
          ? `A value left as ${app.config.mask} keeps what is stored.`
          : null,
      }),
      field("Not before", durationField("delay"), "Empty: at once."),
    ],
    submit: (data) =>
      app.act(
        () =>
          app.api.post(`dead-letters/${encodeURIComponent(task.reference)}/edit-and-replay`, {
            ...readObjects(data, "payload"),
            delay_sec: readDuration(data, "delay") ?? 0,
          }),
        `Task ${task.id} waits again, with its new payload.`,
      ),
  });
}
