/* Small SVG charts with a text alternative. */

import { svg } from "../dom.js";

const WIDTH = 240;
const HEIGHT = 44;

/** Bars of `values` per minute, with `failures` stacked in red at the bottom. */
export function bars({ values, failures = [], label }) {
  const peak = Math.max(...values, 1);
  const step = WIDTH / Math.max(values.length, 1);
  const drawn = values.flatMap((value, index) => {
    const failed = Math.min(failures[index] ?? 0, value);
    const place = { x: index * step, width: Math.max(step - 1, 0.5) };
    return [
      bar({ ...place, from: failed, to: value, peak, kind: "done" }),
      bar({ ...place, from: 0, to: failed, peak, kind: "failed" }),
    ];
  });
  return frame("chart chart-bars", label, drawn);
}

function bar({ x, width, from, to, peak, kind }) {
  if (to <= from) return null;
  // At least one pixel, so that a single task among thousands stays visible.
  const height = Math.max(((to - from) / peak) * (HEIGHT - 2), 1);
  const y = HEIGHT - (from / peak) * (HEIGHT - 2) - height;
  return svg("rect", {
    class: `bar-${kind}`,
    x: x.toFixed(2),
    y: y.toFixed(2),
    width: width.toFixed(2),
    height: height.toFixed(2),
  });
}

/** A line of shares between 0 and 1, with the area below; NaN means that there is no data. */
export function shareLine({ shares, label }) {
  const peak = Math.max(...shares.filter(Number.isFinite), 0.05);
  const step = WIDTH / Math.max(shares.length - 1, 1);
  const points = shares.map((share, index) => [
    (index * step).toFixed(1),
    (HEIGHT - 1 - ((Number.isFinite(share) ? share : 0) / peak) * (HEIGHT - 4)).toFixed(1),
  ]);
  const line = points.map((point) => point.join(",")).join(" ");
  if (!shares.some(Number.isFinite)) return frame("chart chart-line", label, []);
  return frame("chart chart-line", label, [
    svg("polygon", { class: "area", points: `0,${HEIGHT} ${line} ${WIDTH},${HEIGHT}` }),
    svg("polyline", { class: "line", points: line }),
  ]);
}

function frame(className, label, children) {
  return svg(
    "svg",
    {
      class: className,
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    },
    children,
  );
}
