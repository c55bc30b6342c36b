/* The base class of all views. */

import { h } from "../dom.js";

export class View {
  title = "";
  /** The last result of `load`; null until then. */
  data = null;

  constructor(app) {
    this.app = app;
    this.api = app.api;
  }

  /** Set the route; called again when only its query changes. */
  open(route) {
    this.route = route;
    this.query = route.query;
  }

  async load() {
    return null;
  }

  /** The heading of a view, with its actions beside it. */
  heading(text, ...actions) {
    return h(
      "div",
      { class: "heading", key: "heading" },
      h("h1", {}, text),
      h("div", { class: "actions" }, actions),
    );
  }

  loading() {
    return h("p", { class: "loading", key: "loading" }, "Loading…");
  }
}
