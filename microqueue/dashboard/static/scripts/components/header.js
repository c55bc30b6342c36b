/* The page's header: navigation, counts, and the state of the connection. */

import { fragment, h } from "../dom.js";
import { isEstimate, short } from "../format.js";
import { href } from "../routes.js";
import { NAVIGATION } from "../views/navigation.js";

const STATES = {
  live: ["Live", "Changes appear as they happen."],
  lost: ["Disconnected", "Reconnecting. The page may be out of date."],
  connecting: ["Connecting", "Waiting for the server."],
};

export function header(app) {
  return fragment(
    bar(app),
    app.loadError &&
      h(
        "p",
        { class: "load-error", role: "alert", key: "load-error" },
        `Could not refresh: ${app.loadError}`,
      ),
  );
}

function bar(app) {
  const current = app.route.view;
  return h(
    "div",
    { class: "bar", key: "bar" },
    h("a", { class: "brand", href: href("overview") }, logo(), h("span", {}, "microqueue")),
    h(
      "nav",
      { "aria-label": "Views" },
      NAVIGATION.map(({ view, label, counted, alarming }) => {
        const queues = (counted && app.overview?.queues) || [];
        const count = sum(queues, counted);
        const estimated = queues.some((queue) => isEstimate(queue, counted));
        return h(
          "a",
          { key: view, href: href(view), "aria-current": view === current ? "page" : null },
          label,
          count > 0 &&
            h("span", { class: alarming ? "count alarming" : "count" }, short(count, estimated)),
        );
      }),
    ),
    h("div", { class: "bar-end" }, readOnly(app), connection(app), logOut(app)),
  );
}

function logo() {
  return h(
    "span",
    { class: "mark", "aria-hidden": "true" },
    h("span", {}),
    h("span", {}),
    h("span", {}),
  );
}

function sum(queues, name) {
  return queues.reduce((total, queue) => total + (queue[name] ?? 0), 0);
}

function readOnly(app) {
  return app.config?.read_only && h("span", { class: "chip", key: "read-only" }, "Read-only");
}

function connection(app) {
  const [label, explanation] = STATES[app.connection];
  return h(
    "span",
    {
      class: `connection is-${app.connection}`,
      role: "status",
      title: explanation,
      "data-connection": app.connection,
      key: "connection",
    },
    label,
  );
}

function logOut(app) {
  if (!app.config?.auth) return null;
  return h(
    "form",
    { method: "post", action: "logout", key: "log-out" },
    h("button", { class: "button quiet", type: "submit" }, "Log out"),
  );
}
