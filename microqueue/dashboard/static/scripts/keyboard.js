/* Keys for those who do not want to reach for the mouse. None works while one is typing. */

import { h } from "./dom.js";
import { href } from "./routes.js";
import { openForm } from "./parts/dialog.js";
import { NAVIGATION } from "./views/navigation.js";

const HELP = [
  ...NAVIGATION.map(({ shortcut, label }) => [`g ${shortcut}`, label]),
  ["/", "Filter"],
  ["j  k", "Next row, previous row"],
  ["x", "Select the row; with Shift, up to it"],
  ["Enter", "Open the row"],
  ["r", "Read anew"],
  ["?", "These keys"],
];

export function listenToKeys(app) {
  let afterG = false;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const leads = afterG && NAVIGATION.find(({ shortcut }) => shortcut === event.key);
    afterG = event.key === "g";
    const perform = leads ? () => app.go(href(leads.view)) : KEYS[event.key];
    if (!perform) return;
    event.preventDefault();
    perform(app, event);
  });
}

const KEYS = {
  "/": () => document.querySelector("[data-filter]")?.focus(),
  j: () => move(1),
  k: () => move(-1),
  x: () => tick({ range: false }),
  X: () => tick({ range: true }),
  r: (app) => app.refresh(),
  "?": () =>
    openForm({
      title: "Keys",
      action: "Close",
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

function move(step) {
  const all = rows();
  const current = all.findIndex((row) => row.contains(document.activeElement));
  const next = all[current < 0 ? 0 : Math.min(Math.max(current + step, 0), all.length - 1)];
  next?.querySelector("a")?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function tick({ range }) {
  const row = rows().find((one) => one.contains(document.activeElement));
  const box = row?.querySelector("input[type=checkbox]");
  box?.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, shiftKey: range }));
}
