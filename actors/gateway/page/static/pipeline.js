// The live pipeline: a card for each process, charts of the last two minutes, and what happened.

import { command } from "./api.js";
import { LineChart } from "./charts.js";
import { $, make, number, say, toggle } from "./dom.js";

// The way of a request through the stages, and those beside it.
const PATH = ["gateway", "video", "encoder", "prefill", "decode", "detokenizer", "controller", "memory"];
const AFTER = ["video", "encoder", "prefill", "decode", "detokenizer"]; // an arrow leads to these
const TASKS = {
  gateway: "HTTP, text to tokens",
  controller: "admits, plans, journals",
  video: "decodes media",
  encoder: "media to embeddings",
  prefill: "reads prompts",
  decode: "writes answers",
  detokenizer: "tokens to text",
  memory: "owns pages, weights",
};
const POOLS = ["kv", "window", "state", "log", "embedding", "patch", "media"]; // the kinds; a run has those that its model needs
const BESIDE = { kv: ["window", "state", "log"] }; // whose pages come with those of a kind
const SURE_MS = 4000;
const MAX_EVENTS = 40;

export class Pipeline {
  // `hurry()`: a command was given, so look more often for a while.
  constructor(hurry) {
    this.hurry = hurry;
    this.cards = new Map();
    this.last = null;
    this.noted = 0; // the time of the last event shown
    this.rates = new LineChart($("rate-chart"), [{ label: "tokens/s", color: "decode", fill: true }]);
    this.pools = new LineChart(
      $("pool-chart"),
      POOLS.map((pool) => ({ label: pool, color: `pool-${pool}` })),
      { max: 100, unit: " %" },
    );
    this.keys = POOLS.map((pool) => make("span", { class: "key", "data-color": `pool-${pool}`, hidden: true }, pool));
    $("pool-legend").append(...this.keys);
  }

  update(state) {
    const before = this.last && this.last.now < state.now ? this.last : null;
    const seconds = before ? (state.now - before.now) / 1000 : 0;
    this.last = state;
    const actors = [...state.actors].sort((a, b) => PATH.indexOf(a.stage) - PATH.indexOf(b.stage) || a.name.localeCompare(b.name));
    for (const actor of actors) {
      if (!this.cards.has(actor.name)) {
        const card = new Card(actor, (text) => this.note(actor.name, text), this.hurry);
        this.cards.set(actor.name, card);
        $("stages").append(card.element);
      }
      const earlier = before?.actors.find((one) => one.name === actor.name);
      this.cards.get(actor.name).update(actor, earlier, seconds, state);
    }
    this.summarize(state, before, seconds);
    for (const event of state.events) {
      if (event.at <= this.noted) continue; // another gateway tells everything again
      this.noted = event.at;
      this.note(event.actor, event.text, new Date(Date.now() - (state.now - event.at)));
    }
  }

  summarize(state, before, seconds) {
    const { waiting, preparing, running } = state.counts;
    say($("counts"), `${waiting} waiting · ${preparing} preparing · ${running} running`);
    const tokens = before?.epoch === state.epoch ? state.totals.tokens - before.totals.tokens : 0;
    const rate = seconds > 0 ? Math.max(0, tokens / seconds) : 0;
    say($("rate"), number(rate));
    this.rates.add([rate]);
    const pools = POOLS.map((kind) => ofKind(state.pools, kind));
    this.keys.forEach((key, index) => (key.hidden = !pools[index]));
    this.pools.add(pools.map((pool) => (pool ? share(pool) : null)));
  }

  // No answer came: say so on every card, without a change of the layout.
  lost() {
    for (const card of this.cards.values()) toggle(card.element, "data-state", "unknown");
  }

  note(actor, text, at = new Date()) {
    const time = at.toLocaleTimeString("en-GB");
    $("events").prepend(make("li", {}, make("time", {}, time), make("b", {}, actor), make("span", {}, text)));
    while ($("events").children.length > MAX_EVENTS) $("events").lastChild.remove();
  }
}

const share = (pool) => (pool.pages ? (100 * pool.used) / pool.pages : 0);

// The pools of a kind on all devices together, "kv" and "kv.1" for example; null if the run has none.
function ofKind(pools, kind) {
  const found = Object.entries(pools).filter(([name]) => name.split(".")[0] === kind);
  if (!found.length) return null;
  return Object.fromEntries(["pages", "used", "evictable"].map((field) => [field, found.reduce((sum, [, pool]) => sum + pool[field], 0)]));
}

class Card {
  constructor(actor, tell, hurry) {
    this.name = actor.name;
    this.stage = actor.stage;
    this.tell = tell;
    this.hurry = hurry;
    this.state = make("span", { class: "state" });
    this.values = LABELS.map(() => make("dd"));
    this.extra = make("dt", { title: BUDGETS[actor.stage] });
    this.cpu = new Bar("CPU");
    const kinds = actor.output && actor.output !== "deltas" ? [actor.output, ...(BESIDE[actor.output] ?? [])] : [];
    this.pools = kinds.map((kind) => [kind, new Bar(kind, `pool-${kind}`, `pages of ${kind}`)]);
    this.kill = make("button", { type: "button", class: "danger", "aria-label": `Kill ${actor.name}`, onclick: () => this.killNow() }, "Kill");
    this.restart = make(
      "button",
      { type: "button", "aria-label": `Restart ${actor.name}`, onclick: () => this.order("restart") },
      "Restart",
    );
    this.element = make(
      "li",
      { class: "stage", "data-state": "unknown", "data-actor": actor.name, "data-after": AFTER.includes(actor.stage) },
      make("div", { class: "title" }, make("h3", {}, actor.name), this.state),
      make("p", { class: "task" }, TASKS[actor.stage] ?? ""),
      make("dl", {}, ...this.values.map((value, index) => make("div", {}, LABELS[index] ? make("dt", {}, LABELS[index]) : this.extra, value))),
      make("div", { class: "bars" }, this.cpu.element, ...this.pools.map(([, bar]) => bar.element)),
      make("div", { class: "row" }, this.restart, this.kill),
    );
  }

  update(actor, before, seconds, state) {
    toggle(this.element, "data-state", actor.state);
    say(this.state, actor.state);
    this.state.title = actor.broken || (actor.last_end ? `the last process ended with ${actor.last_end}` : "");
    const isSame = before && before.pid === actor.pid && seconds > 0;
    const steps = isSame ? (actor.steps - before.steps) / seconds : 0;
    const [label, extra] = EXTRAS[actor.stage]?.(state) ?? ["up", uptime(actor.up_ms)];
    say(this.extra, label);
    const values = [actor.pid ?? "–", actor.generation, actor.restarts, actor.queue, number(Math.max(0, steps)), extra];
    this.values.forEach((value, index) => say(value, String(values[index])));
    const cpu = isSame ? (actor.cpu_ms - before.cpu_ms) / seconds / 10 : 0;
    this.cpu.set(cpu, `${number(Math.max(0, cpu))} %`);
    for (const [kind, bar] of this.pools) {
      const pool = ofKind(state.pools, kind);
      bar.element.hidden = !pool;
      if (pool) bar.set(share(pool), `${number(pool.used)} / ${number(pool.pages)}`, pool.evictable / (pool.pages || 1));
    }
    this.restart.disabled = this.kill.disabled = !state.commands;
    this.keeps = state.keeps_connections;
    this.restart.title = this.kill.title = state.commands ? "" : "This run has no supervisor.";
  }

  // Where nobody keeps its connections, a gateway's death costs them, also this page's: ask once more.
  killNow() {
    if (this.stage !== "gateway" || this.keeps || this.kill.dataset.sure !== undefined) return this.order("kill");
    this.kill.dataset.sure = "";
    this.kill.textContent = "Drop connections?";
    setTimeout(() => {
      delete this.kill.dataset.sure;
      this.kill.textContent = "Kill";
    }, SURE_MS);
  }

  async order(verb) {
    const button = verb === "kill" ? this.kill : this.restart;
    button.setAttribute("aria-busy", "true");
    this.hurry();
    try {
      const { message } = await command(verb, this.name);
      if (this.name === "gateway") this.tell(message.replace("gateway ", "").replace("gateway: ", "")); // of the others the feed tells
    } catch (error) {
      this.tell(`${verb} failed: ${error.message}`);
    } finally {
      button.removeAttribute("aria-busy");
    }
  }
}

const LABELS = ["pid", "gen", "restarts", "queue", "steps/s", ""];

// The last value of some stages: budgets, and what they did.
const EXTRAS = {
  prefill: ({ budgets }) => ["budget", number(budgets.prefill_tokens)],
  encoder: ({ budgets }) => ["budget", number(budgets.encode_rows)],
  decode: ({ budgets }) => ["ms/step", budgets.tbt_ms ? number(budgets.tbt_ms, 1) : "–"],
  controller: ({ totals }) => ["finished", number(totals.finished)],
};

const BUDGETS = { prefill: "tokens of a step, as learned", encoder: "patch rows of a step, as learned" };

function uptime(ms) {
  const minutes = Math.floor(ms / 60_000);
  return minutes < 1 ? `${Math.floor(ms / 1000)} s` : minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h`;
}

// A labelled bar, and behind what is used the part that a cache holds.
class Bar {
  constructor(label, tint = "accent", meaning = label) {
    this.text = make("span", { class: "number" });
    this.used = make("i", { class: "used" });
    this.cached = make("i", { class: "cached" });
    this.meter = make("div", { class: "meter", role: "meter", "aria-label": meaning, "aria-valuemin": 0, "aria-valuemax": 100, "data-color": tint });
    this.meter.append(this.cached, this.used);
    this.element = make("div", { class: "bar" }, make("span", {}, label), this.text, this.meter);
  }

  set(percent, text, cached = 0) {
    const used = Math.min(100, Math.max(0, percent));
    say(this.text, text);
    this.used.style.width = `${used}%`;
    this.cached.style.width = `${Math.min(100, used + 100 * cached)}%`;
    toggle(this.meter, "aria-valuenow", Math.round(used));
  }
}
