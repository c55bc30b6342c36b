/* Keyboard shortcuts. They are off while the user types or a dialog is open. */

import { h } from "./dom.js";
import { href } from "./routes.js";
import { openForm } from "./components/dialog.js";
import { NAVIGATION } from "./views/navigation.js";

const HELP = [
  ...NAVIGATION.map(({ shortcut, label }) => [`g ${shortcut}`, label]),
  ["/", "Focus the filter"],
  ["j  k", "Next / previous row"],
  ["x", "Select the row (Shift: select a range)"],
  ["Enter", "Open the row"],
  ["r", "Refresh"],
  ["?", "Keyboard shortcuts"],
];

export function handleShortcuts(app) {
  let afterG = false;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const target = afterG && NAVIGATION.find(({ shortcut }) => shortcut === event.key);
    afterG = event.key === "g";
    const perform = target ? () => app.go(href(target.view)) : SHORTCUTS[event.key];
    if (!perform) return;
    event.preventDefault();
    perform(app, event);
  });
}

const SHORTCUTS = {
  "/": () => document.querySelector("[data-filter]")?.focus(),
  j: () => focusRow(1),
  k: () => focusRow(-1),
  x: () => toggleRow({ range: false }),
  X: () => toggleRow({ range: true }),
  r: (app) => app.refresh(),
  "?": () =>
    openForm({
      title: "Keyboard shortcuts",
      action: "Close",
      dismiss: null,
      fields: h(
        "dl",
        { class: "keys" },
        HELP.map(([keys, meaning]) =>
          h("div", {}, h("dt", {}, h("kbd", {}, keys)), h("dd", {}, meaning)),
        ),
      ),
      submit: () => {},
    }),
};

function isTyping(target) {
  const typed = target.matches?.("input:not([type=checkbox]), textarea, select");
  return typed || document.querySelector("dialog[open]") !== null;
}

function rows() {
  return [...document.querySelectorAll("[data-row]")];
}

function focusRow(step) {
  const all = rows();
  const current = all.findIndex((row) => row.contains(document.activeElement));
  const next = all[current < 0 ? 0 : Math.min(Math.max(current + step, 0), all.length - 1)];
  next?.querySelector("a")?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function toggleRow({ range }) {
  const row = rows().find((one) => one.contains(document.activeElement));
  const box = row?.querySelector("input[type=checkbox]");
  box?.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, shiftKey: range }));
}
