/* The selected rows: some by id, or everything that matches the filter. */

export class Selection {
  #ids = new Set();
  #anchor = null;
  #everythingSince = null;

  /** Whether everything that matches the filter is selected, also on other pages. */
  get everything() {
    return this.#everythingSince !== null;
  }

  /** When everything was selected; later rows are not part of the selection. */
  get since() {
    return this.#everythingSince;
  }

  get ids() {
    return [...this.#ids];
  }

  get size() {
    return this.#ids.size;
  }

  get empty() {
    return !this.everything && this.size === 0;
  }

  has(id) {
    return this.everything || this.#ids.has(id);
  }

  /** Select or deselect one row, or with `range` all from the last one to it. */
  toggle(id, { on, range = false, order = [] }) {
    if (this.everything) this.selectOnly(order);
    for (const one of range ? between(order, this.#anchor, id) : [id]) this.#set(one, on);
    this.#anchor = id;
  }

  /** Select or deselect a whole page. */
  page(order, on) {
    if (this.everything) this.clear();
    for (const id of order) this.#set(id, on);
  }

  /** Select everything that matches the filter as of `instant`. */
  all(instant) {
    this.#ids.clear();
    this.#everythingSince = instant;
  }

  selectOnly(ids) {
    this.clear();
    for (const id of ids) this.#ids.add(id);
  }

  clear() {
    this.#ids.clear();
    this.#anchor = null;
    this.#everythingSince = null;
  }

  /** Return whether "all", "some" or "none" of a page are selected. */
  stateOf(order) {
    const selected = order.filter((id) => this.has(id)).length;
    if (!selected) return "none";
    return selected === order.length ? "all" : "some";
  }

  #set(id, on) {
    if (on) this.#ids.add(id);
    else this.#ids.delete(id);
  }
}

function between(order, from, to) {
  const start = order.indexOf(from);
  const end = order.indexOf(to);
  if (start < 0 || end < 0) return [to];
  return order.slice(Math.min(start, end), Math.max(start, end) + 1);
}
