/* Keep the times on the page current between two refreshes: countdowns, ages, times left.
   The timer runs only while the page shows something that ticks. */

import { countdown } from "./countdown.js";
import { ago, until } from "./format.js";
import { h } from "./dom.js";

/** Several times a second, so that each row changes close to its own full second. */
const PERIOD = 250;

export class Ticker {
  #timer = null;
  #elements = [];

  /** `now()` gives the server's time, or null while it is unknown. */
  constructor(now) {
    this.now = now;
  }

  /** Look what ticks below `root`, and run while something does. */
  watch(root) {
    this.#elements = [...root.querySelectorAll("[data-tick]")];
    this.tick();
    if (this.#elements.length && this.#timer === null) {
      this.#timer = setInterval(() => this.tick(), PERIOD);
    } else if (!this.#elements.length && this.#timer !== null) {
      clearInterval(this.#timer);
      this.#timer = null;
    }
  }

  tick() {
    const now = this.now();
    for (const element of this.#elements) SHOW[element.dataset.tick](element, now);
  }
}

/** The countdown of a running task: seconds left, with a bar of the lease's share. */
export function countdownElement({ startedAt, deadline, timeout }) {
  return h(
    "span",
    {
      class: "countdown",
      role: "timer",
      "data-tick": "countdown",
      "data-started": milliseconds(startedAt),
      "data-deadline": milliseconds(deadline),
      "data-timeout": timeout,
    },
    h("span", { class: "countdown-text" }),
    h("span", { class: "countdown-bar", "aria-hidden": "true" }, h("span", {})),
  );
}

/** How long ago an instant was, with the instant itself as a tooltip. */
export function agoElement(value) {
  return instantElement("ago", value);
}

/** How long until an instant. */
export function untilElement(value) {
  return instantElement("until", value);
}

function instantElement(kind, value) {
  if (!value) return "—";
  return h("time", {
    datetime: value,
    title: value,
    "data-tick": kind,
    "data-at": Date.parse(value),
  });
}

const SHOW = {
  countdown(element, now) {
    const { started, deadline, timeout } = element.dataset;
    const shown = countdown(
      { startedAt: read(started), deadline: read(deadline), timeout: read(timeout) },
      now,
    );
    setText(element.firstChild, shown.text);
    element.classList.toggle("is-overdue", shown.overdue);
    element.classList.toggle("is-late", shown.left !== null && shown.left > 0 && shown.left <= 10);
    element.lastChild.firstChild.style.width = `${(shown.share * 100).toFixed(1)}%`;
  },
  ago: (element, now) => setText(element, now === null ? "…" : ago(read(element.dataset.at), now)),
  until: (element, now) =>
    setText(element, now === null ? "…" : until(read(element.dataset.at), now)),
};

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function read(text) {
  return text === undefined ? NaN : Number(text);
}

function milliseconds(value) {
  const instant = Date.parse(value ?? "");
  return Number.isNaN(instant) ? null : instant;
}
