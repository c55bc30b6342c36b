/* How much longer a lease lasts. It only displays: the sweeper moves tasks. */

/** Whole seconds until `deadline`, rounded up: a lease shows 1 until its very end. */
export function secondsLeft(deadline, now) {
  return Math.max(Math.ceil((deadline - now) / 1000), 0);
}

/**
 * Say what the countdown of a running task shows at `now`.
 *
 * Instants are in milliseconds. `now` is null until the configuration and with it the server's
 * time are loaded. A task without a start time has no lease that could end; one whose end is not
 * written ends `timeout` seconds after its start.
 */
export function countdown({ startedAt, deadline, timeout }, now) {
  if (!Number.isFinite(startedAt)) return { text: "—", overdue: false, left: null, share: 0 };
  if (now === null) return { text: "…", overdue: false, left: null, share: 0 };
  const end = Number.isFinite(deadline) ? deadline : startedAt + timeout * 1000;
  if (!Number.isFinite(end)) return { text: "—", overdue: false, left: null, share: 0 };
  const left = secondsLeft(end, now);
  if (left === 0) return { text: "Overdue", overdue: true, left, share: 0 };
  const share = Math.min(Math.max((end - now) / (end - startedAt || 1), 0), 1);
  return { text: `${left} s`, overdue: false, left, share };
}
