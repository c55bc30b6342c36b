/* Short messages about the result of an action, also for screen readers. */

import { h } from "../dom.js";

/** How long a message is shown, in ms; errors are shown for twice as long. */
const DURATION = 6000;

/** Show a message. `kind` is "done" or "problem". */
export function toast(message, kind = "done") {
  const note = h(
    "div",
    { class: `toast toast-${kind}`, role: kind === "problem" ? "alert" : "status" },
    message,
  );
  const dismiss = () => note.remove();
  note.onclick = dismiss;
  document.getElementById("toasts").append(note);
  setTimeout(dismiss, kind === "problem" ? DURATION * 2 : DURATION);
}
