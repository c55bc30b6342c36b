/* The views by the first segment of the address. */

import { AuditView } from "./audit.js";
import { DeadLettersView } from "./dead-letters.js";
import { EventsView } from "./events.js";
import { NamesView } from "./names.js";
import { OverviewView } from "./overview.js";
import { ProcessingView } from "./processing.js";
import { ScheduleView } from "./schedule.js";
import { SchedulesView } from "./schedules.js";
import { TaskView } from "./task.js";
import { TasksView } from "./tasks.js";
import { TopicView } from "./topic.js";
import { TopicsView } from "./topics.js";

const VIEWS = {
  overview: OverviewView,
  processing: ProcessingView,
  tasks: TasksView,
  names: NamesView,
  "dead-letters": DeadLettersView,
  schedules: SchedulesView,
  topics: TopicsView,
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
  if (view === "schedules" && rest.length > 1) return ScheduleView;
  if (view === "topics" && rest.length) return TopicView;
  return VIEWS[view] ?? OverviewView;
}
