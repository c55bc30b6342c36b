/* One SSE connection for the whole page. It reports what happened in bursts, says whether it is
   connected, and asks for everything anew when something may have been missed. */

export const EVENT_TYPES = [
  "task.enqueued",
  "task.started",
  "task.done",
  "task.retried",
  "task.failed",
  "task.reclaimed",
  "task.released",
  "task.changed",
  "task.removed",
  "task.replayed",
  "queue.requeue",
  "queue.move_to_dlq",
  "queue.paused",
  "queue.resumed",
  "sweep.finished",
  "worker.started",
  "worker.left",
  "worker.gone",
];

const CONTROL_TYPES = ["hello", "refresh", "heartbeat"];
const BURST = 300;
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 15_000;
const MISSED_HEARTBEATS = 3;
/** The server greets within 5 s; a browser that has no connection left says nothing at all. */
const GREETING = 10_000;

export class Events {
  /** "live" or "lost", or "connecting" until one of these is known. */
  state = "connecting";

  #source = null;
  #heartbeat = null;
  #lastId = null;
  #pause = FIRST_PAUSE;
  #burst = [];
  #timer = null;
  #toldAt = -BURST;
  #silence = null;

  /**
   * `onBurst(events)` is called at most every 300 ms, with the events that happened meanwhile;
   * `onState("live" | "lost")` when that changes; `onGap()` when events may have been missed.
   */
  constructor({ address, onBurst, onState, onGap }) {
    this.address = new URL(address, document.baseURI);
    this.onBurst = onBurst;
    this.onState = onState;
    this.onGap = onGap;
  }

  /** Listen, from where this page left off if the server still knows what came after. */
  open() {
    this.close();
    const address = new URL(this.address);
    if (this.#lastId) address.searchParams.set("last_event_id", this.#lastId);
    const source = new EventSource(address);
    this.#source = source;
    source.onerror = () => this.#failed(source);
    for (const type of [...EVENT_TYPES, ...CONTROL_TYPES]) {
      source.addEventListener(type, (message) => this.#heard(type, message));
    }
    this.#expectMore(GREETING);
  }

  /** Let go of the connection. What is shown stays as good as it is. */
  close() {
    this.#source?.close();
    this.#source = null;
    clearTimeout(this.#silence);
  }

  #failed(source) {
    if (source !== this.#source) return;
    clearTimeout(this.#silence);
    this.#become("lost");
    // The browser tries again by itself, unless the server refused.
    if (source.readyState !== EventSource.CLOSED) return;
    setTimeout(() => source === this.#source && this.open(), this.#pause);
    this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE);
  }

  #heard(type, message) {
    const data = parse(message.data);
    if (message.lastEventId) this.#lastId = message.lastEventId;
    if (type === "hello") {
      this.#pause = FIRST_PAUSE;
      this.#heartbeat = data.heartbeat_sec * 1000;
      this.#become("live");
      this.onGap();
    } else if (type !== "heartbeat") {
      this.#collect(type, message.lastEventId, data);
    }
    this.#expectMore(MISSED_HEARTBEATS * this.#heartbeat);
  }

  #become(state) {
    this.state = state;
    this.onState(state);
  }

  /** Keep what happened until the server says that this was all for now. */
  #collect(type, id, data) {
    if (type !== "refresh") {
      this.#burst.push({ type, id, ...data });
    } else if (this.#timer === null) {
      const pause = this.#toldAt + BURST - performance.now();
      this.#timer = setTimeout(() => this.#tell(), Math.max(pause, 0));
    }
  }

  #tell() {
    this.#timer = null;
    this.#toldAt = performance.now();
    this.onBurst(this.#burst.splice(0));
  }

  /** A connection whose heartbeat has ended is dead, whatever TCP says. */
  #expectMore(within) {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => {
      this.#become("lost");
      this.open();
    }, within);
  }
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    return {};
  }
}
