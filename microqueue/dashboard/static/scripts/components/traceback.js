/* The traceback of a task's last failure: closed until it is opened, with a button that copies it. */

import { h } from "../dom.js";
import { button } from "./common.js";
import { toast } from "./toast.js";

export function tracebackDetails(text) {
  if (!text) return null;
  return h(
    "details",
    { class: "traceback", key: "traceback" },
    h("summary", {}, "Traceback"),
    h(
      "div",
      { class: "traceback-text" },
      button("Copy", (event) => copy(text, event.currentTarget), { kind: "quiet", key: "copy" }),
      h("pre", { tabindex: 0, "aria-label": "Traceback" }, text),
    ),
  );
}

/** Copy a text; where the browser does not allow it, as without HTTPS, select it instead. */
async function copy(text, { nextElementSibling: shown }) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Traceback copied.");
  } catch {
    getSelection().selectAllChildren(shown);
    toast("Traceback selected. Copy it with your keyboard.");
  }
}
