/* The views by the first segment of the address. */

import { AuditView } from "./audit.js";
import { DeadLettersView } from "./dead-letters.js";
import { EventsView } from "./events.js";
import { OverviewView } from "./overview.js";
import { ProcessingView } from "./processing.js";
import { TaskView } from "./task.js";
import { TasksView } from "./tasks.js";

const VIEWS = {
  overview: OverviewView,
  processing: ProcessingView,
  tasks: TasksView,
  "dead-letters": DeadLettersView,
  events: EventsView,
  audit: AuditView,
};

/**
 * Return the view class of a route.
 *
 * A view has a `title`. `open(route)` sets its route, `load()` returns its data, which the app
 * stores in `data`, and `render()` returns its elements, also before anything is loaded.
 */
export function viewOf({ view, rest }) {
  if (view === "tasks" && rest.length) return TaskView;
  return VIEWS[view] ?? OverviewView;
}
