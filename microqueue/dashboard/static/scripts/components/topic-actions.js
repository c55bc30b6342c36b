/* Actions on topics: publish, bind, unbind. */

import { h } from "../dom.js";
import { pretty } from "../format.js";
import {
  FormError,
  confirmAction,
  deliveryFields,
  field,
  jsonField,
  openForm,
  readDuration,
  readObjects,
} from "./dialog.js";
import { button } from "./common.js";

/** The buttons that publish to a topic and bind a queue to it; without a name, forms ask for it. */
export function topicActions(app, topic = "") {
  return [
    button("Bind a queue…", () => openBindForm(app, topic), { key: "bind" }),
    button("Publish…", () => openPublishForm(app, topic), { kind: "primary", key: "publish" }),
  ];
}

export function unbindButton(app, topic, queue) {
  return button(
    "Unbind…",
    () =>
      confirmAction({
        title: `Unbind queue ${queue}?`,
        explanation: `Later messages of topic ${topic} do not become tasks of queue ${queue}. Tasks that it has stay.`,
        action: "Unbind",
        perform: () =>
          app.act(
            () => app.api.post(address(topic, "unbind"), { queue }),
            ({ was_bound: bound }) =>
              `Queue ${queue} ${bound ? "unbound from" : "was not bound to"} topic ${topic}.`,
          ),
      }),
    { key: "unbind" },
  );
}

function openPublishForm(app, topic) {
  openForm({
    title: "Publish a message",
    action: "Publish",
    wide: true,
    fields: [
      h(
        "div",
        { class: "field-row" },
        topicField(topic),
        field(
          "Key",
          h("input", { name: "key", maxlength: 255, autocomplete: "off" }),
          "Such as shop.eu; filters of bindings may use it.",
          "key",
        ),
      ),
      jsonField("Message", "message", pretty({})),
      jsonField("Headers", "headers", pretty({}), { rows: 2 }),
    ],
    submit: (data) =>
      app.act(
        () =>
          app.api.post(address(data.get("topic"), "publish"), {
            key: data.get("key"),
            ...readObjects(data, "message", "headers"),
          }),
        (published) => `Message ${published.position} published to ${published.topic}.`,
      ),
  });
}

function openBindForm(app, topic) {
  openForm({
    title: "Bind a queue to a topic",
    action: "Bind",
    wide: true,
    fields: [
      h("p", {}, "Each later message becomes a task of the queue."),
      h(
        "div",
        { class: "field-row" },
        topicField(topic),
        field(
          "Queue",
          h("input", {
            name: "queue",
            required: true,
            maxlength: 120,
            list: "queue-names",
            autocomplete: "off",
          }),
          null,
          "queue",
        ),
      ),
      h(
        "datalist",
        { id: "queue-names" },
        (app.overview?.queues ?? []).map((one) => h("option", { value: one.queue })),
      ),
      field(
        "Key pattern",
        h("input", { name: "pattern", maxlength: 255, autocomplete: "off", placeholder: "shop.*" }),
        "* is one word, # any number of words. Leave it empty for all messages.",
        "filter",
      ),
      jsonField("Fields", "conditions", pretty({}), {
        rows: 2,
        hint: 'Or only messages with these values, as in {"order.country": "FR"}.',
      }),
      h(
        "div",
        { class: "field-row" },
        deliveryFields(app),
      ),
    ],
    submit: (data) => {
      const queue = data.get("queue");
      const name = data.get("topic");
      const body = {
        queue,
        filter: readFilter(data),
        priority: Number(data.get("priority") || 0),
        delay_sec: readDuration(data, "delay"),
        max_attempts: data.get("max_attempts") ? Number(data.get("max_attempts")) : null,
      };
      return app.act(
        () => app.api.post(address(name, "bind"), body),
        `Queue ${queue} bound to topic ${name}.`,
      );
    },
  });
}

function topicField(topic) {
  return field(
    "Topic",
    h("input", {
      name: "topic",
      value: topic,
      required: true,
      maxlength: 80,
      autocomplete: "off",
    }),
    null,
    "name",
  );
}

function readFilter(data) {
  const pattern = data.get("pattern").trim();
  const { conditions } = readObjects(data, "conditions");
  if (!Object.keys(conditions).length) return pattern || null;
  if (pattern)
    throw new FormError([{ path: "filter", message: "Enter a key pattern or fields, not both." }]);
  return conditions;
}

function address(topic, verb) {
  return `topics/${encodeURIComponent(topic)}/${verb}`;
}
