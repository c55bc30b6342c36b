/* Format numbers, durations and instants as short text. All functions are pure. */

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;
const PERIOD_UNITS = [
  [DAY * 1000, "d"],
  [HOUR * 1000, "h"],
  [MINUTE * 1000, "m"],
  [1000, "s"],
  [1, "ms"],
];

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 12,345: exact. */
export function number(value) {
  return value === null || value === undefined ? "—" : whole.format(value);
}

/** 12.3K, and ~12.3K for an estimate: compact. */
export function short(value, estimated = false) {
  if (value === null || value === undefined) return "—";
  return `${estimated ? "~" : ""}${value < 10_000 ? whole.format(value) : compact.format(value)}`;
}

/** ~12,300: an estimate, rounded to three digits. */
export function about(value) {
  const step = 10 ** Math.max(String(Math.abs(Math.round(value))).length - 3, 0);
  return `~${whole.format(Math.round(value / step) * step)}`;
}

/** 512 B, 1.2 kB, 64.0 MB. */
export function size(bytes) {
  if (!Number.isFinite(bytes)) return "—";
  const units = ["B", "kB", "MB", "GB"];
  let power = 0;
  while (power < units.length - 1 && bytes >= 1000 ** (power + 1)) power += 1;
  return `${power ? (bytes / 1000 ** power).toFixed(1) : bytes} ${units[power]}`;
}

/** 1 task, 2 tasks, ~12,300 tasks. */
export function count(value, noun, plural = `${noun}s`, estimated = false) {
  return `${estimated ? about(value) : number(value)} ${value === 1 ? noun : plural}`;
}

/** Whether a figure of a queue is an estimate. */
export function isEstimate(queue, name) {
  return queue.estimated?.includes(name) ?? false;
}

/** A duration in seconds with its two largest units: 4 s, 3 m 20 s, 2 h 5 m, 3 d 4 h. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "—";
  const total = Math.max(Math.floor(seconds), 0);
  if (total < MINUTE) return `${total} s`;
  if (total < HOUR) return pair(total, MINUTE, "m", 1, "s");
  if (total < DAY) return pair(total, HOUR, "h", MINUTE, "m");
  return pair(total, DAY, "d", HOUR, "h");
}

/** A duration in seconds, exact: 90 s is 1 m 30 s, 0.5 s is 500 ms. */
export function period(seconds) {
  if (!Number.isFinite(seconds)) return "—";
  const parts = [];
  let rest = Math.round(seconds * 1000);
  for (const [size, name] of PERIOD_UNITS) {
    const amount = Math.floor(rest / size);
    rest -= amount * size;
    if (amount) parts.push(`${amount} ${name}`);
  }
  return parts.join(" ") || "0 s";
}

function pair(total, large, largeName, small, smallName) {
  const rest = Math.floor((total % large) / small);
  const head = `${Math.floor(total / large)} ${largeName}`;
  return rest ? `${head} ${rest} ${smallName}` : head;
}

/** How long an attempt took: 85 ms, 3.2 s, then as a duration. */
export function took(milliseconds) {
  if (!Number.isFinite(milliseconds)) return "—";
  if (milliseconds < 1000) return `${Math.max(Math.round(milliseconds), 0)} ms`;
  return milliseconds < 60_000
    ? `${(milliseconds / 1000).toFixed(1)} s`
    : duration(milliseconds / 1000);
}

/** The age: "now", "12 s ago". */
export function ago(instant, now) {
  const seconds = (now - toInstant(instant)) / 1000;
  if (!Number.isFinite(seconds)) return "—";
  return seconds < 1 ? "now" : `${duration(seconds)} ago`;
}

/** The time left, rounded up: "now", "in 12 s". */
export function until(instant, now) {
  const seconds = Math.ceil((toInstant(instant) - now) / 1000);
  if (!Number.isFinite(seconds)) return "—";
  return seconds <= 0 ? "now" : `in ${duration(seconds)}`;
}

/** An instant of the API, or milliseconds, as milliseconds; NaN if there is none. */
export function toInstant(value) {
  return typeof value === "number" ? value : Date.parse(value ?? "");
}

/** The viewer's local date and time, to the second. */
export function instant(value) {
  const date = new Date(toInstant(value));
  if (Number.isNaN(date.getTime())) return "—";
  return `${localDate(date)} ${localTime(date)}`;
}

/** The local time of day. */
export function timeOfDay(value) {
  const date = new Date(toInstant(value));
  return Number.isNaN(date.getTime()) ? "—" : localTime(date);
}

/** The value of an <input type="datetime-local">. */
export function toLocalInput(value) {
  const date = new Date(toInstant(value));
  return Number.isNaN(date.getTime()) ? "" : `${localDate(date)}T${localTime(date)}`;
}

/** A share as a percentage: 0 %, 0.4 %, 12 %. */
export function percent(share) {
  if (!Number.isFinite(share)) return "—";
  const value = share * 100;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

/** Indented JSON, or the text itself. */
export function pretty(value) {
  return JSON.stringify(value, null, 2) ?? "null";
}

/** Indented JSON for reading: numbers in extended JSON are written as plain numbers. */
export function readable(value) {
  const text = JSON.stringify(value, (_, item) => numberOf(item) ?? item, 2) ?? "null";
  return text.replace(/"\\u0001([^"\\]*)\\u0001"/g, "$1");
}

/** The digits of a number in extended JSON, between markers; undefined for any other value. */
function numberOf(item) {
  if (item === null || typeof item !== "object" || Object.keys(item).length !== 1) return undefined;
  const digits = item.$numberLong ?? item.$numberDouble;
  return typeof digits === "string" ? `\u0001${digits}\u0001` : undefined;
}

/** One line of JSON, cut to fit a row. */
export function brief(value, limit = 160) {
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "");
  return text.length > limit ? `${text.slice(0, limit - 1)}…` : text;
}

function localDate(date) {
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

function localTime(date) {
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

function two(value) {
  return String(value).padStart(2, "0");
}
