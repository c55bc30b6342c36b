/* An estimate of the server's clock. The browser's wall clock may be wrong or be adjusted, so only
   the time elapsed since a response is measured here, with a monotonic clock. */

export class ServerClock {
  #offset = null;
  #uncertainty = Infinity;
  #measuredAt = 0;

  constructor(monotonic = () => performance.now()) {
    this.monotonic = monotonic;
  }

  /** Whether the server's time is known. */
  get known() {
    return this.#offset !== null;
  }

  /** Update from a response that reports `now`, requested at `sentAt`, received at `receivedAt`. */
  learn(now, sentAt, receivedAt = this.monotonic()) {
    const instant = typeof now === "number" ? now : Date.parse(now ?? "");
    if (!Number.isFinite(instant)) return;
    const uncertainty = (receivedAt - sentAt) / 2;
    const offset = instant - (sentAt + receivedAt) / 2;
    // A fast response is more precise than a slow one. An old sample is replaced, because machines
    // sleep; so is one that the new sample contradicts, because server clocks are adjusted.
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
