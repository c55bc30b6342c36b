/* Filter forms, whose values are part of the address. */

import { h } from "../dom.js";
import { toLocalInput } from "../format.js";
import { href, parse } from "../routes.js";

/** How long after the last key a text filter applies, in ms. */
const TYPING_DELAY = 350;

/** A labelled select that filters a view by queue. */
export function queueFilter(app, view, query) {
  return h(
    "label",
    { class: "inline-field", key: "queue-filter" },
    "Queue",
    queueSelect(app, query.queue, (event) => app.go(href(view, { queue: event.target.value }))),
  );
}

/** A select of the known queues; `every` is the label of the empty option, null for none. */
export function queueSelect(app, chosen, onchange, every = "All queues") {
  const names = new Set((app.overview?.queues ?? []).map((queue) => queue.queue));
  if (chosen) names.add(chosen);
  return h(
    "select",
    { name: "queue", "aria-label": "Queue", onchange, ".value": chosen ?? "" },
    every && h("option", { value: "" }, every),
    [...names].sort().map((name) => h("option", { value: name }, name)),
  );
}

/**
 * A form whose fields are the view's query.
 *
 * Selects apply at once, and text fields soon after the last key. A typed character adds no step to
 * the browser's history.
 */
export function filterForm(app, view, query, ...fields) {
  let typing = null;
  const apply = (form, options) => app.go(href(view, readFilter(form)), options);
  return h(
    "form",
    {
      class: "filter",
      novalidate: true, // A shared address may hold seconds, which the field would reject.
      role: "search",
      key: "filter",
      onsubmit: (event) => {
        event.preventDefault();
        clearTimeout(typing);
        apply(event.currentTarget);
      },
      onchange: (event) =>
        event.target.matches("select, [type=datetime-local]") && apply(event.currentTarget),
      oninput: (event) => {
        if (!event.target.matches("[type=search]")) return;
        clearTimeout(typing);
        const form = event.currentTarget;
        typing = setTimeout(() => {
          // The viewer may have left the page.
          if (parse(location.hash).view === view) apply(form, { replace: true });
        }, TYPING_DELAY);
      },
    },
    fields,
    isFiltered(query) && h("a", { class: "button quiet", key: "clear", href: href(view) }, "Clear"),
  );
}

export function textFilter(name, label, value, attributes = {}) {
  return h(
    "label",
    { class: "inline-field", key: name },
    label,
    h("input", { type: "search", name, ".value": value ?? "", autocomplete: "off", ...attributes }),
  );
}

/** A text field for the whole name of a task. */
export function nameFilter(value) {
  return textFilter("name", "Name", value, { size: 14, placeholder: "whole name" });
}

/** The name in an address, as the API's parameter: empty for tasks without a name. */
export function nameParameter({ name, no_name: unnamed }) {
  return unnamed ? "" : name;
}

/** A name, or null for none, as part of an address. */
export function nameInAddress(name) {
  return name === null ? { no_name: 1 } : { name };
}

/** A time in the viewer's time zone; the address holds it in UTC. */
export function timeFilter(name, label, value) {
  return h(
    "label",
    { class: "inline-field", key: name },
    label,
    h("input", { type: "datetime-local", name, ".value": toLocalInput(value) }),
  );
}

function readFilter(form) {
  const query = Object.fromEntries(new FormData(form));
  for (const name of ["since", "until"]) {
    if (query[name]) query[name] = new Date(query[name]).toISOString();
  }
  return query;
}

function isFiltered(query) {
  return Object.entries(query).some(([name]) => name !== "cursor");
}
