/* The views in the order of the navigation; `g` and the `shortcut` open one. */

export const NAVIGATION = [
  { view: "overview", label: "Overview", shortcut: "o" },
  { view: "processing", label: "Processing", shortcut: "p", counted: "processing" },
  { view: "tasks", label: "Tasks", shortcut: "t" },
  { view: "names", label: "Names", shortcut: "n" },
  { view: "dead-letters", label: "Dead letters", shortcut: "d", counted: "failed", alarming: true },
  { view: "schedules", label: "Schedules", shortcut: "s" },
  { view: "topics", label: "Topics", shortcut: "c" },
  { view: "events", label: "Events", shortcut: "e" },
  { view: "audit", label: "Audit", shortcut: "a" },
];
