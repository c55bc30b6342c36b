/* The page: its clock, its event stream, the open view, and when to refresh. */

import { Api, ApiError } from "./api.js";
import { ServerClock } from "./clock.js";
import { Events } from "./events.js";
import { render } from "./morph.js";
import { parse } from "./routes.js";
import { header } from "./components/header.js";
import { toast } from "./components/toast.js";
import { Ticker } from "./ticker.js";
import { viewOf } from "./views/index.js";

/** How often to refresh without an event, in ms: a worker that dies, for example, sends none. */
const REFRESH_PERIOD = 10_000;
const CONFIG_RETRY_PERIOD = 2_000;
const MAX_RECENT_EVENTS = 500;

export class App {
  /** The server's settings; null until they are loaded. */
  config = null;
  /** The queues, workers and last sweep, as last read; null until then. */
  overview = null;
  /** "connecting" at first, then "live" or "lost". */
  connection = "connecting";
  /** Why the last refresh failed; null if it succeeded. */
  loadError = null;
  /** The latest events, newest first. */
  recentEvents = [];

  #view = null;
  #visit = 0;
  #refreshing = null;
  #refreshAgain = false;

  constructor() {
    this.clock = new ServerClock();
    this.api = new Api(this.clock);
    this.ticker = new Ticker(() => (this.config ? this.clock.now() : null));
    this.events = new Events({
      address: "events",
      onBurst: (events) => this.#onEvents(events),
      onState: (state) => this.#setConnection(state),
      onGap: () => this.refresh(),
    });
    this.main = document.getElementById("main");
    this.top = document.getElementById("top");
  }

  start() {
    addEventListener("hashchange", () => this.#route());
    addEventListener("online", () => this.#openOrCloseStream());
    addEventListener("offline", () => this.#setConnection("lost"));
    document.addEventListener("visibilitychange", () => this.#onVisibilityChange());
    setInterval(() => document.hidden || this.refresh(), REFRESH_PERIOD);
    this.#fetchConfig();
    this.#route();
    this.#openOrCloseStream();
  }

  /** Whether to show buttons that change something: not before the server allows it. */
  get mayAct() {
    return this.config !== null && !this.config.read_only;
  }

  /** Open an address of the page; `replace` adds no step to the browser's history. */
  go(address, { replace = false } = {}) {
    if (address === location.hash) return this.refresh();
    if (!replace) {
      location.hash = address;
      return null;
    }
    history.replaceState(null, "", address);
    return this.#route();
  }

  /** Load the open view again. Calls during a refresh cause one more refresh after it. */
  refresh() {
    if (this.#refreshing) {
      this.#refreshAgain = true;
      return this.#refreshing;
    }
    const refreshing = this.#load().finally(() => {
      if (this.#refreshing !== refreshing) return; // Another view was opened.
      this.#refreshing = null;
      if (this.#refreshAgain) this.refresh();
    });
    this.#refreshing = refreshing;
    this.#refreshAgain = false;
    return refreshing;
  }

  /** Render the header and the open view from the data at hand. */
  draw() {
    render(this.top, header(this));
    if (this.#view) {
      render(this.main, this.#view.render());
      document.title = `${this.#view.title} · microqueue`;
    }
    this.ticker.watch(document.body);
  }

  /** Perform an action, show a message, and refresh. The caller handles errors. */
  async act(perform, message) {
    const result = await perform();
    toast(typeof message === "function" ? message(result) : message);
    this.refresh();
    return result;
  }

  /** Perform an action, and show a message also if it fails. */
  async actOrReport(perform, message) {
    const result = await this.requestOrReport(() => this.act(perform, message));
    if (result === null) this.refresh(); // The page may be out of date.
    return result;
  }

  /** Send a request; if it fails, show a message and return null. */
  async requestOrReport(request) {
    try {
      return await request();
    } catch (error) {
      this.#reportError(error);
      return null;
    }
  }

  #route() {
    const route = parse(location.hash);
    const View = viewOf(route);
    this.#visit += 1;
    if (this.#view?.constructor !== View) {
      this.#view = new View(this);
      this.main.replaceChildren();
      scrollTo(0, 0);
    }
    this.route = route;
    this.#view.open(route);
    this.draw();
    // Do not wait for the data of the previous view.
    this.#refreshing = null;
    return this.refresh();
  }

  async #load() {
    const visit = this.#visit;
    const [overview, data] = await Promise.allSettled([
      this.api.get("overview"),
      this.#view.load(),
    ]);
    if (visit !== this.#visit) return;
    if (overview.status === "fulfilled") this.overview = overview.value;
    if (data.status === "fulfilled") this.#view.data = data.value;
    this.loadError = null;
    this.connection = this.events.state; // An earlier failed request no longer matters.
    for (const { reason } of [overview, data]) if (reason) this.#onLoadError(reason);
    this.draw();
  }

  async #fetchConfig() {
    try {
      this.config = await this.api.get("config");
      this.draw();
    } catch (error) {
      this.#onLoadError(error);
      this.draw();
      setTimeout(() => this.#fetchConfig(), CONFIG_RETRY_PERIOD);
    }
  }

  #onLoadError(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.unauthorised) logIn();
    else if (error.status === 0) this.connection = "lost";
    else this.loadError = error.message;
  }

  #reportError(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.unauthorised) logIn();
    else toast(error.message, "problem");
  }

  /** A hidden page closes its stream: a browser has only six connections for all of its tabs. */
  #openOrCloseStream() {
    if (document.hidden) this.events.close();
    else this.events.open();
  }

  #onVisibilityChange() {
    this.#openOrCloseStream();
    if (!document.hidden) this.refresh();
  }

  #onEvents(events) {
    this.recentEvents = [...events.reverse(), ...this.recentEvents].slice(0, MAX_RECENT_EVENTS);
    if (!document.hidden) this.refresh();
  }

  #setConnection(state) {
    if (this.connection === state) return;
    this.connection = state;
    this.draw();
  }
}

/** Go to the login form, which returns to this view. */
function logIn() {
  location.assign(new URL(`login${location.hash}`, document.baseURI));
}
