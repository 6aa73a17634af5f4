// The load of experts as a heat map: a row for each layer, a column for each expert, one byte a cell.

import { $, el, say, keyed, count, seconds } from "./dom.js";

const PER_MEAN = 64;
const LEGEND = [0, 0.5, 1, 2, 4];

const colours = () => {
  const style = getComputedStyle(document.documentElement);
  return ["--heat-0", "--heat-1", "--heat-2", "--heat-3"].map((name) => parse(style.getPropertyValue(name).trim()));
};
const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** From nothing over the mean (a third of the way) to four times the mean. */
function colour(times, ramp) {
  const at = times <= 1 ? times : 1 + Math.log2(Math.min(times, 4));
  const low = Math.min(Math.floor(at), 2);
  return ramp[low].map((from, i) => Math.round(from + (ramp[low + 1][i] - from) * (at - low)));
}

export class Heat {
  constructor() {
    this.maps = [];
    this.chosen = null;
    this.at = null;
    this.canvas = $("heat-map");
    $("experts-worker").addEventListener("change", (event) => {
      this.chosen = event.target.value;
      this.draw();
    });
    this.canvas.addEventListener("pointermove", (event) => this.look(event.offsetX / this.canvas.clientWidth, event.offsetY / this.canvas.clientHeight));
    this.canvas.addEventListener("pointerleave", () => this.cell(null));
    this.canvas.addEventListener("blur", () => this.cell(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(maps) {
    this.maps = maps;
    $("heat").hidden = maps.length === 0;
    $("no-experts").hidden = maps.length > 0;
    $("experts-pick").hidden = maps.length < 2;
    if (!maps.some((map) => map.worker === this.chosen)) this.chosen = maps[0]?.worker ?? null;
    keyed($("experts-worker"), maps, (m) => m.worker, (m) => el("option", { value: m.worker }, m.worker), () => {});
    if (this.chosen !== null) $("experts-worker").value = this.chosen;
    this.draw();
  }

  get map() {
    return this.maps.find((map) => map.worker === this.chosen);
  }

  draw() {
    const map = this.map;
    if (!map) return say($("experts-aside"), "");
    const { experts } = map;
    const layers = map.layers.length;
    this.cells = Uint8Array.from(atob(map.cells), (c) => c.charCodeAt(0));
    this.canvas.width = experts;
    this.canvas.height = layers;
    this.canvas.style.height = `${Math.max(Math.min(layers * 14, 220), Math.min(layers * 4, 480), 28)}px`;
    const image = new ImageData(experts, layers);
    const ramp = colours();
    const table = Array.from({ length: 256 }, (_, value) => colour(value / PER_MEAN, ramp));
    this.cells.forEach((value, i) => image.data.set([...table[value], 255], i * 4));
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    const worst = map.imbalance.reduce((best, ratio, i) => (ratio > map.imbalance[best] ? i : best), 0);
    const mean = map.imbalance.reduce((sum, ratio) => sum + ratio, 0) / layers;
    const parts = [
      `${layers} layers × ${experts} experts`,
      `max/mean ${mean.toFixed(2)} on average, ${map.imbalance[worst].toFixed(2)} in layer ${map.layers[worst]}`,
      map.ranks !== null && `ranks ${map.ranks.toFixed(2)}`,
      `${count(map.idle)} idle`,
      `${count(map.tokens)} rows ${map.window_s === null ? "since the start" : `in ${seconds(map.window_s)}`}`,
    ].filter(Boolean);
    say($("experts-aside"), parts.join(" · "));
    this.canvas.setAttribute("aria-label", `Expert load of ${map.worker}: ${parts.join(", ")}. Arrow keys read single experts.`);
    const legend = LEGEND.map((times) => ({ times, rgb: `rgb(${colour(times, ramp)})` }));
    keyed($("heat-legend"), legend, (l) => l.times, (l) => el("li", {}, el("i"), l.times === 0 ? "idle" : l.times === 1 ? "mean" : `${l.times}×`), (node, l) => (node.firstChild.style.background = l.rgb));
    this.cell(this.at);
  }

  look(x, y) {
    const map = this.map;
    if (map) this.cell([Math.min(Math.floor(y * map.layers.length), map.layers.length - 1), Math.min(Math.floor(x * map.experts), map.experts - 1)]);
  }

  key(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.map) return;
    event.preventDefault();
    const [layer, expert] = this.at ?? [0, -1];
    const clamp = (value, bound) => Math.min(Math.max(value, 0), bound - 1);
    this.cell([clamp(layer + move[0], this.map.layers.length), clamp(expert + move[1], this.map.experts)]);
  }

  cell(at) {
    this.at = at;
    const map = this.map;
    if (!at || !map || at[0] >= map.layers.length || at[1] >= map.experts) return say($("heat-cell"), "");
    const times = this.cells[at[0] * map.experts + at[1]] / PER_MEAN;
    say($("heat-cell"), `layer ${map.layers[at[0]]}, expert ${at[1]}: ${times >= 3.98 ? "4 or more" : times.toFixed(2)} × mean`);
  }
}
