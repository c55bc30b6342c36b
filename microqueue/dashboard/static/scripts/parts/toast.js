/* Short messages on what an action did; a screen reader hears them too. */

import { h } from "../dom.js";

const STAYS = 6000;

/** Show a message for a while. `kind` is "done" or "problem". */
export function toast(message, kind = "done") {
  const note = h(
    "div",
    { class: `toast toast-${kind}`, role: kind === "problem" ? "alert" : "status" },
    message,
  );
  const dismiss = () => note.remove();
  note.onclick = dismiss;
  document.getElementById("toasts").append(note);
  setTimeout(dismiss, kind === "problem" ? STAYS * 2 : STAYS);
}
