/* The page's connection to the event stream (SSE). It delivers events in batches, reports whether
   it is connected, and asks for a full refresh when events may have been missed. */

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
  "schedule.fired",
  "schedule.changed",
  "schedule.removed",
  "sweep.finished",
  "worker.started",
  "worker.left",
  "worker.gone",
];

const CONTROL_TYPES = ["hello", "refresh", "heartbeat"];
const BATCH_PERIOD = 300;
const FIRST_RETRY_DELAY = 1000;
const MAX_RETRY_DELAY = 15_000;
const MISSED_HEARTBEATS = 3;
/** The server says hello within 5 s. A browser without a free connection reports no error. */
const HELLO_TIMEOUT = 10_000;

export class Events {
  /** "connecting" at first, then "live" or "lost". */
  state = "connecting";

  #source = null;
  #heartbeat = null;
  #lastId = null;
  #retryDelay = FIRST_RETRY_DELAY;
  #batch = [];
  #batchTimer = null;
  #flushedAt = -BATCH_PERIOD;
  #silenceTimer = null;

  /**
   * `onBurst(events)` is called at most every 300 ms, with the events since the last call;
   * `onState("live" | "lost")` when that changes; `onGap()` when events may have been missed.
   */
  constructor({ address, onBurst, onState, onGap }) {
    this.address = new URL(address, document.baseURI);
    this.onBurst = onBurst;
    this.onState = onState;
    this.onGap = onGap;
  }

  /** Connect, and resume after the last event if the server still has those that followed. */
  open() {
    this.close();
    const address = new URL(this.address);
    if (this.#lastId) address.searchParams.set("last_event_id", this.#lastId);
    const source = new EventSource(address);
    this.#source = source;
    source.onerror = () => this.#onError(source);
    for (const type of [...EVENT_TYPES, ...CONTROL_TYPES]) {
      source.addEventListener(type, (message) => this.#onMessage(type, message));
    }
    this.#restartSilenceTimer(HELLO_TIMEOUT);
  }

  /** Close the connection without changing the state that is shown. */
  close() {
    this.#source?.close();
    this.#source = null;
    clearTimeout(this.#silenceTimer);
  }

  #onError(source) {
    if (source !== this.#source) return;
    clearTimeout(this.#silenceTimer);
    this.#setState("lost");
    // The browser reconnects by itself, unless the server rejected the request.
    if (source.readyState !== EventSource.CLOSED) return;
    setTimeout(() => source === this.#source && this.open(), this.#retryDelay);
    this.#retryDelay = Math.min(this.#retryDelay * 2, MAX_RETRY_DELAY);
  }

  #onMessage(type, message) {
    const data = parse(message.data);
    if (message.lastEventId) this.#lastId = message.lastEventId;
    if (type === "hello") {
      this.#retryDelay = FIRST_RETRY_DELAY;
      this.#heartbeat = data.heartbeat_sec * 1000;
      this.#setState("live");
      this.onGap();
    } else if (type !== "heartbeat") {
      this.#collect(type, message.lastEventId, data);
    }
    this.#restartSilenceTimer(MISSED_HEARTBEATS * this.#heartbeat);
  }

  #setState(state) {
    this.state = state;
    this.onState(state);
  }

  /** Collect events until the server sends `refresh`, which ends a batch. */
  #collect(type, id, data) {
    if (type !== "refresh") {
      this.#batch.push({ type, id, ...data });
    } else if (this.#batchTimer === null) {
      const delay = this.#flushedAt + BATCH_PERIOD - performance.now();
      this.#batchTimer = setTimeout(() => this.#flush(), Math.max(delay, 0));
    }
  }

  #flush() {
    this.#batchTimer = null;
    this.#flushedAt = performance.now();
    this.onBurst(this.#batch.splice(0));
  }

  /** A connection without heartbeats is dead, even if TCP reports no error. */
  #restartSilenceTimer(within) {
    clearTimeout(this.#silenceTimer);
    this.#silenceTimer = setTimeout(() => {
      this.#setState("lost");
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
