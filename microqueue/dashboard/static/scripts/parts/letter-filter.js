/* Which dead letters an address means, as the API's queries and selections want it. */

import { href } from "../routes.js";

export class LetterFilter {
  /** `query` is the address's. */
  constructor(query) {
    this.query = query;
  }

  /** The queue; undefined means all of them. */
  get queue() {
    return this.query.queue;
  }

  /** The queue, or all of them, in words. */
  get place() {
    return this.queue ?? "all queues";
  }

  /** Which queues an action is for: it must say so. */
  get scope() {
    return this.queue === undefined ? { all_queues: true } : { queue: this.queue };
  }

  /** Equal for pages of the same letters. */
  get key() {
    return JSON.stringify({ ...this.query, cursor: undefined });
  }

  get narrowed() {
    return ["code", "no_code", "text", "group", "since", "until"].some(
      (name) => name in this.query,
    );
  }

  /** Whether one group is meant. */
  get grouped() {
    return "group" in this.query;
  }

  /** The query of the letters. */
  letters() {
    return { queue: this.queue, ...this.#described() };
  }

  /** The query of the groups: all of them also while one is chosen. */
  groups() {
    const { group, ...described } = this.#described();
    if (group !== undefined) delete described.code;
    return { queue: this.queue, ...described };
  }

  /** The filter for an action on everything that matches and failed before `instant`. */
  everything(instant) {
    const described = this.#described();
    const until = [described.until, instant].filter(Boolean).sort()[0];
    return { ...described, until };
  }

  /** Whether this group is the chosen one. */
  isChosen({ code, message }) {
    return (
      this.query.group === message &&
      (code === null ? "no_code" in this.query : this.query.code === code)
    );
  }

  /** The address of a group, or of all groups if it is the chosen one. */
  addressOf({ code, message }) {
    const { queue, text, since, until } = this.query;
    const rest = { queue, text, since, until };
    if (this.isChosen({ code, message })) return href("dead-letters", rest);
    const named = code === null ? { no_code: 1 } : { code };
    return href("dead-letters", { ...rest, ...named, group: message });
  }

  #described() {
    const { code, no_code: noCode, text, group, since, until } = this.query;
    const described = { code: noCode ? "" : code, text, group, since, until };
    return Object.fromEntries(Object.entries(described).filter(([, value]) => value !== undefined));
  }
}
