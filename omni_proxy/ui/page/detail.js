// One request: every visit to a stage, where each leg went and why.

import { $, el, seconds, count } from "./dom.js";
import { ask } from "./feed.js";
import { STAGES, stageName } from "./gantt.js";

const AGAIN_MS = 1000;

export class Detail {
  #rid = null;
  #timer = 0;

  constructor() {
    this.dialog = $("detail");
    $("detail-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("close", () => {
      if (this.dialog.open) return; // told late: it is open again, for another request
      clearTimeout(this.#timer);
      this.#rid = null;
    });
  }

  open(rid) {
    this.#rid = rid;
    $("detail-title").textContent = "Request";
    $("detail-body").replaceChildren(el("p", { class: "note" }, "…"));
    this.dialog.showModal();
    this.#load(rid);
  }

  async #load(rid) {
    let found;
    try {
      const answer = await ask(`/omni/ui/requests/${encodeURIComponent(rid)}`);
      found = await answer.json();
      if (!answer.ok) throw new Error(found.error?.message ?? `status ${answer.status}`);
    } catch (fault) {
      if (this.#rid === rid) $("detail-body").replaceChildren(el("p", { class: "note" }, fault.message));
      return;
    }
    if (this.#rid !== rid) return;
    $("detail-title").textContent = found.id;
    $("detail-body").replaceChildren(...show(found));
    if (!found.outcome) this.#timer = setTimeout(() => this.#load(rid), AGAIN_MS);
  }
}

function show(found) {
  return [facts(found), ...explained(found.explain), stages(found), ...found.placements.map(placement), ...(found.resumes ?? []).map(resume)];
}

function facts(found) {
  const pairs = [
    ["Outcome", [found.outcome ?? stageName(found.stage), found.error].filter(Boolean).join(": ")],
    ["Model", found.model],
    ["Mode", found.mode ?? "–"],
    ["Endpoint", found.endpoint + (found.stream ? ", streamed" : "")],
    ["First token", seconds(found.ttft_s)],
    ["Total", seconds(found.e2e_s)],
    ["Prompt", `${count(found.prompt_tokens)} tokens`],
    ["Cached", `${count(found.cached_tokens)} (expected ${count(found.predicted_tokens)})`],
    ["Generated", count(found.generated_tokens)],
    ["Attempts", String(found.attempts)],
  ];
  const list = el("dl", { class: "facts" });
  for (const [name, value] of pairs) list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  if (found.detail) list.append(el("div", { class: "wide" }, el("dt", {}, "Why"), el("dd", {}, found.detail)));
  return list;
}

/** Why it took so long, in words, and what would have made it faster. */
function explained(told) {
  if (!told) return [];
  const lines = told.faster.map((one) => el("li", {}, el("span", { class: "num" }, seconds(one.seconds)), el("span", {}, ...withCode(one.text))));
  const list = lines.length ? [el("h3", {}, "What would have made it faster"), el("ol", {}, ...lines)] : [];
  return [el("section", { class: "explained" }, el("p", {}, told.summary), ...list)];
}

/** What stands between backticks is the name of a setting. */
function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

function stages(found) {
  const body = el("tbody");
  const whole = found.e2e_s || 1;
  for (const visit of found.stages) {
    const number = STAGES.indexOf(visit.stage);
    const bar = el("i", { class: `stage-${number}` });
    bar.style.marginLeft = `${Math.min(visit.start_s / whole, 1) * 100}%`;
    bar.style.width = `${Math.min(visit.seconds / whole, 1) * 100}%`;
    const cells = [stageName(visit.stage), seconds(visit.start_s), number === 9 ? "" : seconds(visit.seconds)];
    body.append(el("tr", {}, el("th", { scope: "row" }, cells[0]), el("td", {}, cells[1]), el("td", {}, cells[2]), el("td", { class: "span" }, bar)));
  }
  const head = ["Stage", "began", "lasted", ""].map((text) => el("th", { scope: "col" }, text));
  return el("table", { class: "stages" }, el("thead", {}, el("tr", {}, ...head)), body);
}

function placement(made) {
  const said = [`${made.leg === "prefill" ? "P" : "D"} on `, el("b", {}, made.worker), `: ${made.reason}`];
  const expected = [
    made.start_s !== null && made.start_s !== undefined && `begins in ${seconds(Math.max(made.start_s, 0))}`,
    made.finish_s !== null && made.finish_s !== undefined && `ends in ${seconds(made.finish_s)}`,
    made.cached_tokens !== null && made.cached_tokens !== undefined && `${count(made.cached_tokens)} tokens cached`,
  ].filter(Boolean);
  const most = Math.max(...made.candidates.map((c) => c.load), 1e-9);
  const list = el("ol", { class: "candidates" });
  for (const { worker, load } of made.candidates) {
    const bar = el("i");
    bar.style.width = `${Math.max(0, Math.min(load / most, 1)) * 100}%`;
    list.append(el("li", { class: worker === made.worker ? "chosen" : false }, el("span", {}, worker), el("span", { class: "num" }, seconds(load)), el("span", { class: "bar-box" }, bar)));
  }
  const note = expected.length ? el("p", { class: "aside" }, `Expected: ${expected.join(", ")}`) : null;
  return el("section", { class: "placement" }, el("h3", {}, ...said), note, list);
}

function resume(at) {
  return el("p", { class: "note" }, `Continued after ${seconds(at.start_s)} from ${count(at.tokens)} tokens: ${at.worker} was lost.`);
}
