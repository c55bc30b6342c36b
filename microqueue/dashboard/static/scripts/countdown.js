/* The time left of a lease, for display only: the sweeper reclaims tasks. */

/** Whole seconds until `deadline`, rounded up: a lease shows 1 until it expires. */
export function secondsLeft(deadline, now) {
  return Math.max(Math.ceil((deadline - now) / 1000), 0);
}

/**
 * Return what the countdown of a running task shows at `now`.
 *
 * Instants are in milliseconds. `now` is null until the configuration, and with it the server's
 * time, is loaded. A task without a start time has no lease. A lease without a deadline expires
 * `timeout` seconds after its start.
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
