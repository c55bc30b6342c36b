/* The filter of dead letters in the address, as the API's query and body parameters. */

import { href } from "../routes.js";
import { nameParameter } from "./filter.js";

export class DeadLetterFilter {
  /** `query` is the query of the address. */
  constructor(query) {
    this.query = query;
  }

  /** The queue; undefined means all queues. */
  get queue() {
    return this.query.queue;
  }

  /** The queue's name, or "all queues". */
  get scopeLabel() {
    return this.queue ?? "all queues";
  }

  /** The queue, or all queues, as a body parameter of an action. */
  get scope() {
    return this.queue === undefined ? { all_queues: true } : { queue: this.queue };
  }

  /** Equal for all pages of the same filter. */
  get key() {
    return JSON.stringify({ ...this.query, cursor: undefined });
  }

  get narrowed() {
    return ["name", "no_name", "code", "no_code", "text", "group", "since", "until"].some(
      (name) => name in this.query,
    );
  }

  /** Whether the filter selects a group. */
  get grouped() {
    return "group" in this.query;
  }

  /** The query for the list. */
  queryForList() {
    return { queue: this.queue, ...this.#criteria() };
  }

  /** The query for the groups: all groups, also while one is selected. */
  queryForGroups() {
    const { group, ...criteria } = this.#criteria();
    if (group !== undefined) delete criteria.code;
    return { queue: this.queue, ...criteria };
  }

  /** The filter for an action on everything that matches and failed before `instant`. */
  everything(instant) {
    const criteria = this.#criteria();
    const until = [criteria.until, instant].filter(Boolean).sort()[0];
    return { ...criteria, until };
  }

  /** Whether this group is selected. */
  isSelected({ code, message }) {
    return (
      this.query.group === message &&
      (code === null ? "no_code" in this.query : this.query.code === code)
    );
  }

  /** The address that selects a group, or deselects the selected one. */
  addressOf({ code, message }) {
    const { queue, name, no_name, text, since, until } = this.query;
    const rest = { queue, name, no_name, text, since, until };
    if (this.isSelected({ code, message })) return href("dead-letters", rest);
    const named = code === null ? { no_code: 1 } : { code };
    return href("dead-letters", { ...rest, ...named, group: message });
  }

  #criteria() {
    const { code, no_code: noCode, text, group, since, until } = this.query;
    const name = nameParameter(this.query);
    const criteria = { name, code: noCode ? "" : code, text, group, since, until };
    return Object.fromEntries(Object.entries(criteria).filter(([, value]) => value !== undefined));
  }
}
