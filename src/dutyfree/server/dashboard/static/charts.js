// Charts as SVG. Each is drawn anew; none of them can have the focus. Their text alternatives are labels.

import { h, s } from "./dom.js";
import { outline, quantile } from "./distribution.js";
import { clock, plural, rate, seconds } from "./format.js";

const ROW = 26;

// The end of an axis: a round number.
function niceTop(most) {
  if (most <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 5, 8, 10].map((factor) => factor * power).find((top) => top >= most);
}

export function rates(node, points, step, width) {
  const height = 168;
  const [left, right, top, bottom] = [36, 4, 8, 20];
  const sums = points.map((one) => (one.ok + one.failed + one.error) / step);
  const high = niceTop(Math.max(...sums, 1));
  const x = (index) => left + ((width - left - right) * index) / points.length;
  const y = (value) => top + (height - top - bottom) * (1 - value / high);
  const parts = [];
  for (const value of [0, high / 2, high]) {
    const at = Math.round(y(value)) + 0.5;
    parts.push(s("line", { class: value ? "rule" : "base", x1: left, x2: width - right, y1: at, y2: at }));
    parts.push(s("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, rate(value)));
  }
  for (const [column, below] of [["ok", []], ["failed", ["ok"]], ["error", ["ok", "failed"]]]) {
    let path = "";
    points.forEach((point, index) => {
      if (!point[column]) return;
      const from = below.reduce((sum, name) => sum + point[name], 0) / step;
      const low = y(from);
      const tall = Math.max(low - y(from + point[column] / step), column === "ok" ? 1 : 2);
      path += `M${x(index).toFixed(1)} ${low.toFixed(1)}h${Math.max(1, x(1) - x(0) - 1).toFixed(1)}v${(-tall).toFixed(1)}H${x(index).toFixed(1)}z`;
    });
    parts.push(s("path", { class: column, d: path }));
  }
  const span = points.length * step;
  for (let minute = 0; minute * 60 <= span; minute += 1) {
    const at = x(points.length - (minute * 60) / step);
    const anchor = minute === 0 ? "end" : "middle";
    if (at >= left) parts.push(s("text", { x: at, y: height - 4, "text-anchor": anchor }, minute === 0 ? "now" : `−${minute} min`));
  }
  const label = `Calls per second over ${span / 60} minutes; now ${rate(sums.at(-1) ?? 0)}, at most ${rate(Math.max(...sums))}`;
  draw(node, width, height, label, parts);
}

// One row for each phase: its distribution on a logarithmic axis, with p50 and p95.
export function phases(node, rows, width) {
  const [left, right, top, low, high] = [66, 132, 12, -6, 1];
  const height = top + rows.length * ROW + 20;
  const inner = width - left - right;
  const x = (power) => left + (inner * (Math.min(Math.max(power, low), high) - low)) / (high - low);
  const parts = [];
  const ticks = { [-6]: "1 µs", [-5]: "10 µs", [-4]: "100 µs", [-3]: "1 ms", [-2]: "10 ms", [-1]: "100 ms", 0: "1 s", 1: "10 s" };
  for (let power = low; power <= high; power += 1) {
    parts.push(s("line", { class: "rule", x1: x(power), x2: x(power), y1: top, y2: height - 18 }));
    if (inner > 400 || (power - low) % 2 === 0) parts.push(s("text", { x: x(power), y: height - 4, "text-anchor": "middle" }, ticks[power]));
  }
  parts.push(s("text", { x: width - 70, y: 9, "text-anchor": "end" }, "p50"), s("text", { x: width, y: 9, "text-anchor": "end" }, "p95"));
  const said = [];
  rows.forEach(({ name, total, colour }, index) => {
    const base = top + (index + 1) * ROW - 2;
    const middle = quantile(total, 0.5);
    const tail = quantile(total, 0.95);
    parts.push(s("text", { class: "name", x: 0, y: base - 6 }, name));
    parts.push(s("line", { class: "rule", x1: left, x2: left + inner, y1: base + 0.5, y2: base + 0.5 }));
    if (middle !== null) {
      const heights = outline(total, low, high);
      const points = heights.map((tall, at) => `${x(low + ((at + 0.5) * (high - low)) / heights.length).toFixed(1)} ${(base - tall * (ROW - 6)).toFixed(1)}`);
      parts.push(s("path", { class: `hill ${colour}`, d: `M${x(low)} ${base}L${points.join("L")}L${x(high)} ${base}z` }));
      for (const [value, kind] of [[tail, "tail"], [middle, "median"]]) {
        const at = x(Math.log10(value));
        parts.push(s("line", { class: kind, x1: at, x2: at, y1: base - ROW + 7, y2: base }));
      }
    }
    parts.push(s("text", { class: "name", x: width - 70, y: base - 6, "text-anchor": "end" }, seconds(middle)));
    parts.push(s("text", { x: width, y: base - 6, "text-anchor": "end" }, seconds(tail)));
    if (middle !== null) said.push(`${name}: p50 ${seconds(middle)}, p95 ${seconds(tail)}`);
  });
  draw(node, width, height, `Latency by phase. ${said.join("; ")}`, parts);
}

// Small squares, one for each sandbox; or for several, if there is no room.
export function cells(node, kind, states, width) {
  const [size, gap, most] = [11, 3, 8 * Math.max(1, Math.floor(width / 14))];
  const each = Math.max(1, Math.ceil(states.length / most));
  const perRow = Math.max(1, Math.floor((width + gap) / (size + gap)));
  const parts = [];
  const shown = Math.ceil(states.length / each);
  for (let index = 0; index < shown; index += 1) {
    const state = states[index * each];
    const inset = state === "paused" ? 1 : 0;
    parts.push(
      s("rect", {
        class: `k-${kind} ${state}`,
        x: (index % perRow) * (size + gap) + inset,
        y: Math.floor(index / perRow) * (size + gap) + inset,
        width: size - 2 * inset,
        height: size - 2 * inset,
        rx: 2,
      }),
    );
  }
  const height = Math.max(1, Math.ceil(shown / perRow)) * (size + gap);
  node.setAttribute("viewBox", `0 0 ${width} ${height}`);
  node.setAttribute("height", height);
  node.replaceChildren(...parts);
}

// Actions on a time axis: bars in as few rows as do not overlap.
export function timeline(node, actions, from, to, width, options = {}) {
  const { lane = 16, axis = true, most = 8 } = options;
  const span = Math.max(to - from, 0.001);
  const x = (at) => ((at - from) / span) * width;
  const ends = [];
  const parts = [];
  for (const action of actions) {
    if (action.at < from || action.start > to) continue;
    const start = Math.max(0, x(action.start));
    const long = Math.max(2, x(action.at) - start);
    let row = ends.findIndex((end) => end <= start);
    if (row < 0) row = ends.length < most ? ends.length : most - 1;
    ends[row] = start + long + 0.5;
    const y = row * lane + 1;
    if (options.plain || long < 12 || !action.spans?.length || action.outcome !== "ok") {
      parts.push(s("rect", { class: outcomeClass(action), x: start, y, width: long, height: lane - 3, rx: 1 }));
    } else {
      parts.push(s("rect", { class: "phase-other", x: start, y, width: long, height: lane - 3, rx: 1 }));
      for (const [name, at, length] of action.spans) {
        parts.push(s("rect", { class: `phase-${name}`, x: start + (at / span) * width, y, width: Math.max(0.5, (length / span) * width), height: lane - 3 }));
      }
    }
  }
  const tall = Math.max(1, ends.length) * lane;
  if (axis) {
    parts.push(s("line", { class: "base", x1: 0, x2: width, y1: tall + 1.5, y2: tall + 1.5 }));
    const step = niceStep(span, width);
    const first = options.relative ? 0 : Math.ceil(from / step) * step - from;
    for (let at = first; at <= span; at += step) {
      const anchor = x(from + at) < 24 ? "start" : x(from + at) > width - 24 ? "end" : "middle";
      parts.push(s("text", { x: x(from + at), y: tall + 15, "text-anchor": anchor }, options.relative ? `+${seconds(at)}`.replace("+0 s", "0") : clock(from + at + 1e-4, step >= 1 ? 0 : step >= 0.1 ? 1 : 3)));
    }
  }
  draw(node, width, tall + (axis ? 19 : 0), options.label ?? `Timeline of ${plural(actions.length, "action")}; the table below has them`, parts);
}

function niceStep(span, width) {
  const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400];
  return steps.find((step) => (span / step) * 84 <= width) ?? 604800;
}

export function outcomeClass(action) {
  if (action.outcome === "ok") return "ok";
  return ["infrastructure", "program"].includes(action.outcome) ? "error" : "failed";
}

export function phaseBar(spans, total) {
  const bar = h("span", { class: "phases", "aria-hidden": "true" });
  for (const [name, , length] of spans ?? []) {
    const part = h("i", { class: `phase-${name}`, title: `${name}: ${seconds(length)}` });
    part.style.width = `${Math.min(100, (100 * length) / Math.max(total, 1e-9))}%`;
    bar.append(part);
  }
  return bar;
}

function draw(node, width, height, label, parts) {
  node.setAttribute("viewBox", `0 0 ${width} ${height}`);
  node.setAttribute("height", height);
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
  node.replaceChildren(...parts);
}
