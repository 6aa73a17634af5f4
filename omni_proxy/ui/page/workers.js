// Pools and their workers: what each holds, and the buttons that take one out and bring it back.

import { $, el, say, keyed, seconds, count } from "./dom.js";
import { ask } from "./feed.js";

const POOLS = [
  ["prefill", "Prefill"],
  ["decode", "Decode"],
  ["mixed", "Mixed"],
  ["encode", "Encode"],
];
const CONFIRM_MS = 4000;

/** A bar with its figures; `parts` are shares of the whole, drawn one after another. */
function meter(label, wide = "") {
  const text = el("span", { class: "meter-text" });
  const bars = el("span", { class: "meter-bar" }, el("i"), el("i", { class: "stranded" }));
  const node = el("div", { class: `cell meter ${wide}`, "data-label": label }, text, bars);
  node.show = (said, ...parts) => {
    say(text, said);
    parts.forEach((part, i) => (bars.children[i].style.width = `${Math.min(1, Math.max(0, part)) * 100}%`));
    bars.hidden = parts.length === 0;
  };
  return node;
}

function makeWorker(controls, done) {
  const name = el("span", { class: "worker-name" });
  const note = el("span", { class: "worker-note" });
  const state = el("span", { class: "state" });
  const running = meter("Running");
  const tokens = el("div", { class: "cell figure", "data-label": "Prompt tokens" });
  const kv = meter("KV cache", "wide");
  const free = el("div", { class: "cell figure", "data-label": "Free in" });
  const button = el("button", { type: "button", class: "quiet", hidden: !controls });
  const row = el("li", { class: "worker" }, el("div", { class: "cell who" }, state, name, note), running, tokens, kv, free);
  row.append(el("div", { class: "cell act" }, button));
  let worker = null;
  let sure = 0;
  button.addEventListener("click", () => {
    if (worker.state !== "draining" && !sure) {
      sure = setTimeout(() => ((sure = 0), label()), CONFIRM_MS);
      return label();
    }
    clearTimeout(sure);
    sure = 0;
    change(worker, worker.state === "draining" ? "undrain" : "drain", done);
    label();
  });
  const label = () => {
    const what = worker.state === "draining" ? "Undrain" : sure ? "Really drain?" : "Drain";
    say(button, what);
    button.setAttribute("aria-label", `${what} ${worker.endpoint || worker.name}`);
    button.classList.toggle("sure", sure !== 0);
  };
  row.show = (now) => {
    worker = now;
    say(name, now.name);
    say(note, [now.engine, now.turns_to && `turns to ${now.turns_to}`, now.backup && "backup"].filter(Boolean).join(" · "));
    say(state, now.state);
    state.dataset.state = now.state;
    state.title = now.reason ?? "";
    row.title = now.reason ?? "";
    running.show(`${now.sequences}${now.max_sequences ? ` / ${now.max_sequences}` : ""}`, now.sequences / (now.max_sequences || 1));
    say(tokens, count(now.prefill_tokens));
    showKv(kv, now);
    say(free, now.current_role === "decode" ? "–" : now.prefill_free_s > 0 ? seconds(now.prefill_free_s) : "now");
    label();
  };
  return row;
}

function showKv(kv, now) {
  const stranded = now.stranded_kv_tokens ?? 0;
  const used = now.kv_tokens - stranded;
  const capacity = now.kv_capacity_tokens;
  const left = stranded ? `, ${count(stranded)} stranded` : "";
  if (capacity) kv.show(`${count(now.kv_tokens)} / ${count(capacity)}${left}`, used / capacity, stranded / capacity);
  else kv.show(`${count(now.kv_tokens)}${left}`);
}

async function change(worker, what, done) {
  const name = worker.endpoint || worker.name;
  const path = `/omni/workers/${name.split("/").map(encodeURIComponent).join("/")}/${what}`;
  try {
    const answer = await ask(path, { method: "POST" });
    const body = await answer.json();
    const good = what === "drain" ? "drains" : "is used again as soon as it answers";
    done(answer.ok ? `${name} ${good}` : `${name}: ${body.error?.message ?? answer.status}`);
  } catch (fault) {
    done(`${name}: ${fault.message}`);
  }
}

function makePool(title) {
  const list = el("ul", { class: "workers" });
  const aside = el("p", { class: "aside" });
  const heads = ["Running", "Prompt tokens", "KV cache", "Free in", ""].map((text) => el("span", {}, text));
  const head = el("div", { class: "workers-head", "aria-hidden": "true" }, el("span", { class: "pool-name" }, title), ...heads);
  const node = el("div", { class: "pool", role: "group", "aria-label": `${title} workers` }, head, list);
  return Object.assign(node, { list, aside });
}

export function showWorkers(snapshot, done) {
  const workers = snapshot.workers;
  $("no-workers").hidden = workers.length > 0;
  const pools = POOLS.map(([role, title]) => ({ role, title, workers: workers.filter((w) => w.current_role === role) }));
  keyed(
    $("pools"),
    pools.filter((pool) => pool.workers.length),
    (pool) => pool.role,
    (pool) => makePool(pool.title),
    (node, pool) => {
      const sorted = pool.workers.toSorted((a, b) => (a.name < b.name ? -1 : 1));
      keyed(node.list, sorted, (w) => w.name, () => makeWorker(snapshot.controls, done), (row, w) => row.show(w));
    },
  );
  const up = workers.filter((w) => w.state === "up").length;
  say($("workers-aside"), workers.length ? `${up} of ${workers.length} up` : "");
}
