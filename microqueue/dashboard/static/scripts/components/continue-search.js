/* Continue a search that stopped early to stay fast. */

import { h } from "../dom.js";
import { href } from "../routes.js";
import { button } from "./common.js";

/** The note and button below an incomplete list; `next` is the cursor to continue from. */
export function continueSearchPanel({ app, path, filter, query, view, next }) {
  return h(
    "div",
    { class: "unfinished", key: "unfinished" },
    h("p", { class: "note" }, "The search stopped here to stay fast. Older tasks may match too."),
    button(
      "Continue search",
      (event) => continueSearch(event.currentTarget, { app, path, filter, query, view, next }),
      { key: "continue-search" },
    ),
  );
}

/** Request page after page until one has a match, and open it. */
async function continueSearch(pressed, { app, path, filter, query, view, next }) {
  const from = location.hash;
  pressed.disabled = true;
  let cursor = next;
  for (;;) {
    const page = await app.requestOrReport(() => app.api.get(path, { ...filter, cursor }));
    if (!page || location.hash !== from) break; // It failed, or the user left the view.
    if (page.items.length || page.complete) {
      app.go(href(view, { ...query, cursor }));
      break;
    }
    cursor = page.next_cursor;
  }
  pressed.disabled = false;
}
