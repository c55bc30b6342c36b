/* Update the times on the page between refreshes: countdowns, ages, times left. The timer runs only
   while the page shows at least one of them. */

import { countdown } from "./countdown.js";
import { ago, until } from "./format.js";
import { h } from "./dom.js";

/** In ms. Several times a second, so that each row changes close to a full second. */
const PERIOD = 250;

export class Ticker {
  #timer = null;
  #elements = [];

  /** `now()` returns the server's time, or null while it is unknown. */
  constructor(now) {
    this.now = now;
  }

  /** Find the elements to update below `root`, and run the timer while there are any. */
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
    for (const element of this.#elements) UPDATERS[element.dataset.tick](element, now);
  }
}

/** The countdown of a running task: seconds left, and a bar with the share of the lease left. */
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

/** The age of an instant, with the instant as a tooltip. */
export function agoElement(value) {
  return instantElement("ago", value);
}

/** The time until an instant. */
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

const UPDATERS = {
  countdown(element, now) {
    const { started, deadline, timeout } = element.dataset;
    const shown = countdown(
      { startedAt: toNumber(started), deadline: toNumber(deadline), timeout: toNumber(timeout) },
      now,
    );
    setText(element.firstChild, shown.text);
    element.classList.toggle("is-overdue", shown.overdue);
    element.classList.toggle(
      "is-expiring",
      shown.left !== null && shown.left > 0 && shown.left <= 10,
    );
    element.lastChild.firstChild.style.width = `${(shown.share * 100).toFixed(1)}%`;
  },
  ago: (element, now) =>
    setText(element, now === null ? "…" : ago(toNumber(element.dataset.at), now)),
  until: (element, now) =>
    setText(element, now === null ? "…" : until(toNumber(element.dataset.at), now)),
};

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function toNumber(text) {
  return text === undefined ? NaN : Number(text);
}

function milliseconds(value) {
  const instant = Date.parse(value ?? "");
  return Number.isNaN(instant) ? null : instant;
}
