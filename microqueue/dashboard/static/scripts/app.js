/* The page: its clock, its connection, the view that is open, and when it is read anew. */

import { Api, ApiError } from "./api.js";
import { ServerClock } from "./clock.js";
import { Events } from "./events.js";
import { render } from "./morph.js";
import { parse } from "./routes.js";
import { header } from "./parts/header.js";
import { toast } from "./parts/toast.js";
import { Ticker } from "./ticker.js";
import { viewOf } from "./views/index.js";

/** What no event tells, such as a worker that falls silent, is seen after this many ms. */
const BACKSTOP = 10_000;
const FEED_LENGTH = 500;

export class App {
  /** The server's settings; null until they are loaded. */
  config = null;
  /** The queues, workers and last sweep as last read; null until they are. */
  overview = null;
  /** "live", "lost", or "connecting" until one of these is known. */
  connection = "connecting";
  /** Why what is shown could not be read anew; null if it could. */
  trouble = null;
  /** The latest events, newest first. */
  feed = [];

  #view = null;
  #visit = 0;
  #reading = null;
  #again = false;

  constructor() {
    this.clock = new ServerClock();
    this.api = new Api(this.clock);
    this.ticker = new Ticker(() => (this.config ? this.clock.now() : null));
    this.events = new Events({
      address: "events",
      onBurst: (events) => this.#happened(events),
      onState: (state) => this.#connected(state),
      onGap: () => this.refresh(),
    });
    this.main = document.getElementById("main");
    this.top = document.getElementById("top");
  }

  start() {
    addEventListener("hashchange", () => this.#route());
    addEventListener("online", () => this.#listen());
    addEventListener("offline", () => this.#connected("lost"));
    document.addEventListener("visibilitychange", () => this.#seen());
    setInterval(() => document.hidden || this.refresh(), BACKSTOP);
    this.#loadConfig();
    this.#route();
    this.#listen();
  }

  /** Whether buttons that act are shown: not before the server has said that they work. */
  get mayAct() {
    return this.config !== null && !this.config.read_only;
  }

  /** Open an address of the page; `replace` leaves no step in the history. */
  go(address, { replace = false } = {}) {
    if (address === location.hash) return this.refresh();
    if (!replace) {
      location.hash = address;
      return null;
    }
    history.replaceState(null, "", address);
    return this.#route();
  }

  /** Read what is shown anew. Calls that come while it is being read are answered by one more. */
  refresh() {
    if (this.#reading) {
      this.#again = true;
      return this.#reading;
    }
    const reading = this.#readAll().finally(() => {
      if (this.#reading !== reading) return; // Another view was opened meanwhile.
      this.#reading = null;
      if (this.#again) this.refresh();
    });
    this.#reading = reading;
    this.#again = false;
    return reading;
  }

  /** Show what is known now. */
  draw() {
    render(this.top, header(this));
    if (this.#view) {
      render(this.main, this.#view.render());
      document.title = `${this.#view.title} · microqueue`;
    }
    this.ticker.watch(document.body);
  }

  /** Perform an action, say what came of it, and show the result. Errors are the caller's. */
  async act(perform, message) {
    const answer = await perform();
    toast(typeof message === "function" ? message(answer) : message);
    this.refresh();
    return answer;
  }

  /** Perform an action of a button: what goes wrong is shown. */
  async attempt(perform, message) {
    const answer = await this.ask(() => this.act(perform, message));
    if (answer === null) this.refresh(); // What was shown is no longer so.
    return answer;
  }

  /** Ask the server something for a button; null, and a message, if it cannot be answered. */
  async ask(question) {
    try {
      return await question();
    } catch (error) {
      this.#report(error);
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
    // The former view's answer no longer matters; do not wait for it.
    this.#reading = null;
    return this.refresh();
  }

  async #readAll() {
    const visit = this.#visit;
    const [overview, data] = await Promise.allSettled([
      this.api.get("overview"),
      this.#view.load(),
    ]);
    if (visit !== this.#visit) return;
    if (overview.status === "fulfilled") this.overview = overview.value;
    if (data.status === "fulfilled") this.#view.data = data.value;
    this.trouble = null;
    this.connection = this.events.state; // A request that failed before no longer matters.
    for (const { reason } of [overview, data]) if (reason) this.#unreadable(reason);
    this.draw();
  }

  async #loadConfig() {
    try {
      this.config = await this.api.get("config");
      this.draw();
    } catch (error) {
      this.#unreadable(error);
      this.draw();
      setTimeout(() => this.#loadConfig(), BACKSTOP / 5);
    }
  }

  #unreadable(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.unauthorised) logIn();
    else if (error.status === 0) this.connection = "lost";
    else this.trouble = error.message;
  }

  #report(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.unauthorised) logIn();
    else toast(error.message, "problem");
  }

  /** A page that nobody sees holds no connection: a browser has but six for all of its tabs. */
  #listen() {
    if (document.hidden) this.events.close();
    else this.events.open();
  }

  #seen() {
    this.#listen();
    if (!document.hidden) this.refresh();
  }

  #happened(events) {
    this.feed = [...events.reverse(), ...this.feed].slice(0, FEED_LENGTH);
    if (!document.hidden) this.refresh();
  }

  #connected(state) {
    if (this.connection === state) return;
    this.connection = state;
    this.draw();
  }
}

/** Go to the login form, which comes back to this view. */
function logIn() {
  location.assign(new URL(`login${location.hash}`, document.baseURI));
}
