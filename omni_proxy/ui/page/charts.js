// Small charts of the last five minutes: lines over time, the figures of one instant beside the title.

import { el, svg, say, seconds, rate, percent } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 72;

const share = (part, whole) => (whole > 0 ? part / whole : null);

/** What is drawn: lines in the order of their importance, the first is filled. */
const CHARTS = [
  {
    name: "Time to first token",
    show: seconds,
    floor: 0.05,
    lines: [
      { label: "p50", of: (p) => p.ttft_p50_s },
      { label: "p95", of: (p) => p.ttft_p95_s },
    ],
  },
  {
    name: "Time per output token",
    show: seconds,
    floor: 0.005,
    lines: [
      { label: "p50", of: (p) => p.tpot_p50_s },
      { label: "p95", of: (p) => p.tpot_p95_s },
    ],
  },
  {
    name: "Goodput",
    show: (value) => (value === null || value === undefined ? "–" : `${rate(value)}/s`),
    floor: 1,
    lines: [
      { label: "good", of: (p) => p.good / p.seconds },
      { label: "all", of: (p) => p.ended / p.seconds },
    ],
  },
  {
    name: "Cached share of prompts",
    show: percent,
    floor: 1,
    lines: [{ label: "cached", of: (p) => share(p.cached_tokens, p.prompt_tokens) }],
  },
  {
    name: "Waiting requests",
    show: (value) => (value === null || value === undefined ? "–" : String(value)),
    floor: 4,
    lines: [{ label: "waiting", of: (p) => p.waiting }],
  },
];

/** The next round number above a value: 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((bound) => bound >= value * 0.999999);
}

class Chart {
  constructor(spec, count) {
    this.spec = spec;
    this.count = count;
    this.points = [];
    this.at = null;
    this.top = el("span", { class: "chart-top" });
    this.values = spec.lines.map(() => el("b"));
    const legend = spec.lines.map((line, i) => el("span", { class: `key line-${i}` }, line.label, " ", this.values[i]));
    this.when = el("span", { class: "chart-when" });
    this.area = svg("path", { class: "area" });
    this.paths = spec.lines.map((_, i) => svg("path", { class: `line line-${i}` }));
    this.cursor = svg("path", { class: "cursor" });
    this.plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.plot.append(svg("path", { class: "grid", d: `M0 ${HEIGHT / 2}H${WIDTH}` }), this.area);
    this.plot.append(...this.paths.toReversed(), this.cursor);
    this.box = el("div", { class: "plot", tabindex: 0, role: "img" }, this.plot, this.top);
    this.box.addEventListener("pointermove", (event) => this.point(event.offsetX / this.box.clientWidth));
    this.box.addEventListener("pointerleave", () => this.look(null));
    this.box.addEventListener("blur", () => this.look(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.node = el("figure", { class: "chart" });
    this.node.append(el("figcaption", {}, el("span", { class: "chart-name" }, spec.name), this.when), this.box);
    this.node.append(el("p", { class: "keys" }, ...legend));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.points.length) return;
    event.preventDefault();
    const last = this.points.length - 1;
    this.look(Math.min(last, Math.max(0, (this.at ?? last + 1) + step)));
  }

  point(x) {
    const index = Math.round(x * (this.count - 1)) - (this.count - this.points.length);
    this.look(index >= 0 && index < this.points.length ? index : null);
  }

  look(index) {
    this.at = index;
    this.read();
  }

  draw(points) {
    this.points = points;
    const { lines, floor } = this.spec;
    const values = lines.map((line) => points.map(line.of));
    const top = roundUp(Math.max(floor, ...values.flat().filter((v) => v !== null && v !== undefined)));
    const x = (i) => ((this.count - points.length + i) / (this.count - 1)) * WIDTH;
    const y = (value) => HEIGHT - 1 - (value / top) * (HEIGHT - 4);
    values.forEach((series, i) => this.paths[i].setAttribute("d", path(series, x, y)));
    this.area.setAttribute("d", filled(values[0], x, y));
    say(this.top, this.spec.show(top));
    this.read();
  }

  read() {
    const { lines, show } = this.spec;
    const known = this.points.length;
    const point = this.at === null ? latest(this.points, lines[0].of) : this.points[this.at];
    lines.forEach((line, i) => say(this.values[i], point ? show(line.of(point)) : "–"));
    const said = lines.map((line, i) => `${line.label} ${this.values[i].textContent}`).join(", ");
    const moment = this.at !== null && point ? new Date(point.at * 1000).toLocaleTimeString() : "";
    say(this.when, moment);
    this.box.setAttribute("aria-label", `${this.spec.name}: ${said}${moment ? ` at ${moment}` : ""}`);
    const x = ((this.count - known + (this.at ?? 0)) / (this.count - 1)) * WIDTH;
    this.cursor.setAttribute("d", this.at === null ? "" : `M${x} 0V${HEIGHT}`);
  }
}

function latest(points, of) {
  for (let i = points.length - 1; i >= 0 && i >= points.length - 15; i--) {
    if (of(points[i]) !== null && of(points[i]) !== undefined) return points[i];
  }
  return points.at(-1);
}

/** Lines end where nothing can be said; a lone value is a dash. */
function runs(series) {
  const found = [];
  let run = null;
  series.forEach((value, i) => {
    if (value === null || value === undefined) run = null;
    else if (run) run.push(i);
    else found.push((run = [i]));
  });
  return found;
}

function path(series, x, y) {
  return runs(series)
    .map((run) => {
      const steps = run.map((i) => `${x(i).toFixed(1)} ${y(series[i]).toFixed(1)}`);
      return steps.length === 1 ? `M${(x(run[0]) - 1.5).toFixed(1)} ${y(series[run[0]]).toFixed(1)}h3` : `M${steps.join("L")}`;
    })
    .join("");
}

function filled(series, x, y) {
  return runs(series)
    .map((run) => {
      const steps = run.map((i) => `L${x(i).toFixed(1)} ${y(series[i]).toFixed(1)}`).join("");
      return `M${x(run[0]).toFixed(1)} ${HEIGHT}${steps}L${x(run.at(-1)).toFixed(1)} ${HEIGHT}Z`;
    })
    .join("");
}

export class Charts {
  constructor(parent, count) {
    this.count = count;
    this.charts = CHARTS.map((spec) => new Chart(spec, count));
    parent.append(...this.charts.map((chart) => chart.node));
  }

  show(points) {
    for (const chart of this.charts) chart.draw(points.slice(-this.count));
  }
}
