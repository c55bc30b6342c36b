/* A search that stopped to stay quick can be told to go on. */

import { h } from "../dom.js";
import { href } from "../routes.js";
import { button } from "./pieces.js";

/** What stands below rows that are not all: `next` is where the search stopped. */
export function unfinished({ app, path, filter, query, view, next }) {
  return h(
    "div",
    { class: "unfinished", key: "unfinished" },
    h("p", { class: "note" }, "The search stopped here to stay quick; older ones may match too."),
    button("Search on", (event) =>
      searchOn(event.currentTarget, { app, path, filter, query, view, next }),
    ),
  );
}

/** Ask for one stretch after the other until something is found, and open the page with it. */
async function searchOn(pressed, { app, path, filter, query, view, next }) {
  const from = location.hash;
  pressed.disabled = true;
  let cursor = next;
  for (;;) {
    const page = await app.ask(() => app.api.get(path, { ...filter, cursor }));
    if (!page || location.hash !== from) break; // It failed, or the reader went elsewhere.
    if (page.items.length || page.complete) {
      app.go(href(view, { ...query, cursor }));
      break;
    }
    cursor = page.next_cursor;
  }
  pressed.disabled = false;
}
