// Recent requests: ten stages on two tracks. A row's SVG is in seconds, so that another scale is another viewBox.

import { $, el, svg, say, keyed, seconds, count } from "./dom.js";

export const STAGES = [
  "RECEIVED",
  "TOKENIZING",
  "APC_MATCHING",
  "PREFILL_WAITING",
  "PREFILL_SCHEDULED",
  "PREFILL_RUNNING",
  "DECODE_WAITING",
  "DECODE_SCHEDULED",
  "DECODE_RUNNING",
  "FINISHED",
];
const FIRST_D = 6;
const CLOCK_S = 30;
const LANE = 8;
const GAP = 2;

export const stageName = (stage) => stage.toLowerCase().replaceAll("_", " ").replace("apc", "APC");

export function legend(parent) {
  parent.append(...STAGES.map((name, i) => el("li", { class: `stage-${i}` }, el("i"), stageName(name))));
}

/** Both tracks of a request: `spans` are [stage, begin, length] in seconds. */
export function tracks(spans, first, end) {
  const drawn = spans.map(([stage, begin, length]) =>
    svg("rect", {
      class: `stage-${stage}`,
      x: begin,
      width: Math.max(length, 0),
      y: stage < FIRST_D ? 0 : LANE + GAP,
      height: LANE,
    }),
  );
  if (first !== null && first !== undefined) drawn.push(svg("path", { class: "first", d: `M${first} ${LANE + GAP}v${LANE}` }));
  if (end !== null) drawn.push(svg("path", { class: "end", d: `M${end} 0v${2 * LANE + GAP}` }));
  return drawn;
}

const way = (row) => {
  if (row.prefill && row.decode) return `${row.prefill} → ${row.decode}`;
  return row.decode ?? row.prefill ?? "–";
};

function makeRow(open) {
  const cell = (name) => el("span", { class: name });
  const parts = { id: cell("rid"), way: cell("way"), ttft: cell("num"), e2e: cell("num"), tokens: cell("num"), end: cell("outcome") };
  const plot = svg("svg", { class: "track", preserveAspectRatio: "none", "aria-hidden": "true" });
  const button = el("button", { type: "button", class: "row", tabindex: -1 });
  button.append(parts.id, parts.way, plot, parts.ttft, parts.e2e, parts.tokens, parts.end);
  const item = el("li", {}, button);
  button.addEventListener("click", () => open(item.row.rid));
  return Object.assign(item, { parts, plot, button, drawn: null });
}

function showRow(item, row, box) {
  item.row = row;
  const ended = row.outcome !== null;
  item.plot.setAttribute("viewBox", box(row));
  if (item.drawn === row) return;
  item.drawn = row;
  const { parts } = item;
  say(parts.id, row.id);
  say(parts.way, way(row));
  say(parts.ttft, seconds(row.ttft_s));
  say(parts.e2e, seconds(row.e2e_s));
  say(parts.tokens, `${count(row.prompt_tokens)}${row.cached_tokens ? ` (${count(row.cached_tokens)})` : ""} + ${count(row.generated_tokens)}`);
  say(parts.end, ended ? (row.outcome === "completed" ? "" : row.outcome.replace("_", " ")) : stageName(row.stage));
  item.button.dataset.outcome = row.outcome ?? "live";
  const worker = row.mode === "aggregated" ? `on ${row.decode}` : way(row);
  item.button.setAttribute(
    "aria-label",
    `${row.id}, ${ended ? row.outcome : stageName(row.stage)}, ${worker}, first token ${seconds(row.ttft_s)}, total ${seconds(row.e2e_s)}`,
  );
  item.plot.replaceChildren(...tracks(row.spans, row.ttft_s, ended ? row.e2e_s : null));
}

/** A round length of the axis that most rows fit into. */
function scaleOf(rows) {
  const sorted = rows.map((row) => row.e2e_s).sort((a, b) => a - b);
  const most = Math.max(sorted.at(-1) ?? 1, 0.01);
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((bound) => bound >= most * 0.999);
}

export class Gantt {
  constructor(open) {
    this.open = open;
    this.byClock = false;
    this.list = $("rows");
    legend($("legend"));
    this.list.addEventListener("keydown", (event) => this.key(event));
    for (const [id, clock] of [["axis-arrival", false], ["axis-clock", true]]) {
      $(id).addEventListener("click", () => {
        this.byClock = clock;
        $("axis-arrival").setAttribute("aria-pressed", String(!clock));
        $("axis-clock").setAttribute("aria-pressed", String(clock));
        if (this.last) this.show(...this.last);
      });
    }
  }

  /** One stop for the tab key; arrows move within the list. */
  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const buttons = [...this.list.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    const next = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : at + (step ?? 0);
    if (at < 0 || next === at || !buttons[next]) return;
    event.preventDefault();
    buttons[next].focus();
    this.stop();
  }

  stop() {
    const buttons = [...this.list.querySelectorAll("button")];
    const stop = buttons.includes(document.activeElement) ? document.activeElement : buttons[0];
    for (const button of buttons) button.tabIndex = button === stop ? 0 : -1;
  }

  show(rows, now) {
    this.last = [rows, now];
    $("no-requests").hidden = rows.length > 0;
    $("gantt").hidden = $("legend").hidden = rows.length === 0;
    const scale = this.byClock ? CLOCK_S : scaleOf(rows);
    const height = 2 * LANE + GAP;
    const box = (row) => (this.byClock ? `${now - CLOCK_S - row.arrived} 0 ${CLOCK_S} ${height}` : `0 0 ${scale} ${height}`);
    keyed(this.list, rows, (row) => row.rid, () => makeRow(this.open), (item, row) => showRow(item, row, box));
    this.stop();
    const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => (this.byClock ? part * scale - scale : part * scale));
    const said = marks.map((at) => (at === 0 ? (this.byClock ? "now" : "0") : `${this.byClock ? "−" : ""}${seconds(Math.abs(at))}`));
    keyed($("ticks"), said.map((text, i) => ({ text, i })), (t) => t.i, () => el("span"), (node, t) => say(node, t.text));
  }
}
