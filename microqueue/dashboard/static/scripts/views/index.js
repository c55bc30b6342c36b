/* Which view stands behind an address. */

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
 * Choose the view of a route.
 *
 * A view has a `title`, takes its route in `open(route)`, reads its data in `load()`, is given
 * them as `data`, and gives what it shows from `render()`, also before anything is loaded.
 */
export function viewOf({ view, rest }) {
  if (view === "tasks" && rest.length) return TaskView;
  return VIEWS[view] ?? OverviewView;
}
