// Ties the page together: snapshots in, figures and lists out.

import { $, el, say, keyed, seconds, count, rate, percent } from "./dom.js";
import { Feed, token } from "./feed.js";
import { Charts } from "./charts.js";
import { showWorkers } from "./workers.js";
import { Gantt } from "./gantt.js";
import { Detail } from "./detail.js";
import { Heat } from "./heat.js";

const MAX_POINTS = 150;
const MAX_ROWS = 40;
const TOAST_MS = 5000;

const detail = new Detail();
const gantt = new Gantt((rid) => detail.open(rid));
const charts = new Charts($("charts"), MAX_POINTS);
const heat = new Heat();
let points = [];
let ended = [];
let latest = null;
let paused = false;
let experts = [];

function heard(snapshot) {
  points = (snapshot.whole ? snapshot.points : points.concat(snapshot.points)).slice(-MAX_POINTS);
  // The first tick after everything may tell once more of who had just ended.
  const told = new Set(snapshot.ended.map((row) => row.rid));
  const before = snapshot.whole ? [] : ended.filter((row) => !told.has(row.rid));
  ended = snapshot.ended.concat(before).slice(0, MAX_ROWS);
  experts = snapshot.experts ?? experts;
  latest = snapshot;
  if (!paused) show();
}

function show() {
  const { window: recent, limits } = latest;
  say($("version"), latest.version);
  const figures = [
    ["Waiting", count(latest.waiting), `${count(latest.waiting_tokens)} tokens`],
    ["Live", count(latest.live_count), "requests"],
    ["Goodput", `${rate(recent.good / recent.seconds)}/s`, `of ${rate(recent.ended / recent.seconds)}/s`],
    ["TTFT", seconds(recent.ttft_p50_s), `p95 ${seconds(recent.ttft_p95_s)}`],
    ["TPOT", seconds(recent.tpot_p50_s), `p95 ${seconds(recent.tpot_p95_s)}`],
    ["Cached", percent(recent.prompt_tokens ? recent.cached_tokens / recent.prompt_tokens : null), "of prompt tokens"],
    ["Output", `${rate(recent.generated_tokens / recent.seconds)}/s`, "tokens"],
    ["Failed", count(recent.failed), "in 10 s"],
  ];
  const make = () => el("div", {}, el("dt"), el("dd", { class: "value" }), el("dd", { class: "sub" }));
  keyed($("figures"), figures, (f) => f[0], make, (node, f) => {
    f.forEach((text, i) => say(node.children[i], text));
    node.classList.toggle("bad", f[0] === "Failed" && recent.failed > 0);
    node.title = f[0] === "Goodput" ? `within TTFT ${seconds(limits.ttft_s)} and TPOT ${seconds(limits.tpot_s)}` : "";
  });
  charts.show(points);
  showWorkers(latest, toast);
  const live = latest.live.toSorted((a, b) => b.arrived - a.arrived);
  const rows = live.concat(ended).slice(0, MAX_ROWS);
  say($("requests-aside"), rows.length ? `${latest.live_count} live, the last ${Math.max(rows.length - live.length, 0)} ended` : "");
  gantt.show(rows, latest.now);
  if (latest.experts) heat.show(experts);
  document.body.dataset.ready = "yes";
  if (link.state === "live") say($("link"), latest.ready ? "live" : "live · not ready to serve");
}

const link = { state: "wait" };

function changed(state) {
  link.state = state;
  $("link").dataset.state = state;
  say($("link"), { live: "live", wait: "reconnecting", locked: "needs the token" }[state]);
  $("lock").hidden = state !== "locked" && !token.get();
  if (state === "locked") login(token.get() ? "This token was refused." : "");
}

function login(fault) {
  token.set(null);
  say($("login-fault"), fault);
  if (!$("login").open) $("login").showModal();
}

let clearing = 0;
function toast(text) {
  say($("said"), text);
  clearTimeout(clearing);
  clearing = setTimeout(() => say($("said"), ""), TOAST_MS);
}

function pause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say($("pause"), paused ? "Resume" : "Pause");
  if (!paused && latest) {
    latest.experts = experts;
    show();
  }
}

const feed = new Feed(heard, changed);
$("pause").addEventListener("click", pause);
$("lock").addEventListener("click", () => login(""));
$("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set($("token").value);
  $("token").value = "";
  $("login").close();
  feed.start();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (event.key === "p" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) pause();
});
feed.start();
