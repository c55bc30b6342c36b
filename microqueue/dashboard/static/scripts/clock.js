/* The server's clock, as seen from here. The viewer's own clock may be wrong or be set meanwhile,
   so only the time that has passed since an answer is measured in the browser. */

export class ServerClock {
  #offset = null;
  #uncertainty = Infinity;
  #measuredAt = 0;

  constructor(monotonic = () => performance.now()) {
    this.monotonic = monotonic;
  }

  /** Whether an answer has told the time. */
  get known() {
    return this.#offset !== null;
  }

  /** Learn from an answer that says `now` and took from `sentAt` to `receivedAt`. */
  learn(now, sentAt, receivedAt = this.monotonic()) {
    const instant = typeof now === "number" ? now : Date.parse(now ?? "");
    if (!Number.isFinite(instant)) return;
    const uncertainty = (receivedAt - sentAt) / 2;
    const offset = instant - (sentAt + receivedAt) / 2;
    // A quick answer tells the time better than a slow one; an old one is worth little, for
    // machines sleep, and a clock that was set has to be believed.
    const old = receivedAt - this.#measuredAt > 30_000;
    const moved = Math.abs(offset - (this.#offset ?? offset)) > uncertainty + this.#uncertainty;
    if (!this.known || old || moved || uncertainty <= this.#uncertainty) {
      this.#offset = offset;
      this.#uncertainty = uncertainty;
      this.#measuredAt = receivedAt;
    }
  }

  /** The server's time in milliseconds, or null while it is unknown. */
  now() {
    return this.known ? this.monotonic() + this.#offset : null;
  }
}
