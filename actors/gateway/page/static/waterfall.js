// The waterfall: each request as a row of five lanes on one time axis, and one of them in detail.

import { getBlob } from "./api.js";
import { $, color, duration, make, number, onScheme, say, toggle } from "./dom.js";

// Lanes from top to bottom, and the kinds of work in each. "queue" is waiting.
const LANES = [
  { name: "fetch", label: "Fetch", kinds: ["queue", "fetch"], unit: "B" },
  { name: "media", label: "Decode media", kinds: ["analyse", "preprocess"], unit: "rows" },
  { name: "encode", label: "Encode", kinds: ["load_segments", "encode"], unit: "rows" },
  { name: "prefill", label: "Prefill", kinds: ["load", "prefill"], unit: "tokens" },
  { name: "decode", label: "Decode", kinds: ["decode"], unit: "tokens" },
];
const UNCOUNTED = new Set(["queue", "analyse", "load", "load_segments"]); // kinds that do none of their lane's units
const MAX_ROWS = 24;
const ROW_HEIGHT = 24;
const LABEL_WIDTH = 96;

export class Waterfall {
  constructor() {
    this.requests = new Map(); // by key, in order of arrival
    this.rows = new Map();
    this.now = 0;
    this.chosen = ""; // the key of the request shown; "" follows the newest
    this.wanted = ""; // the id of a request asked for that has not come yet
    $("lanes").append(...LANES.map((lane) => make("span", { class: "key", "data-color": lane.name }, lane.label)));
    $("span").addEventListener("change", () => this.draw());
    $("zoom").addEventListener("click", () => {
      toggle($("zoom"), "aria-pressed", $("zoom").getAttribute("aria-pressed") !== "true");
      this.draw();
    });
    $("download").addEventListener("click", () => this.download());
    new ResizeObserver(() => this.draw()).observe($("requests"));
    onScheme(() => this.draw());
  }

  reset() {
    this.requests.clear();
    for (const row of this.rows.values()) row.element.remove();
    this.rows.clear();
    this.chosen = "";
  }

  update(state) {
    this.now = state.now;
    for (const request of state.requests) this.requests.set(request.key, request);
    const newest = [...this.requests.values()].sort((a, b) => b.begin - a.begin);
    for (const old of newest.splice(MAX_ROWS)) {
      this.requests.delete(old.key);
      this.rows.get(old.key)?.element.remove();
      this.rows.delete(old.key);
    }
    for (const request of newest.toReversed()) {
      if (this.rows.has(request.key)) continue;
      const row = new Row(request, () => this.choose(request.key));
      this.rows.set(request.key, row);
      $("waterfall").prepend(row.element);
    }
    if (this.wanted) this.select(this.wanted);
    this.draw();
  }

  // Show the request with this id, now or as soon as it is known.
  select(id) {
    const found = [...this.requests.values()].find((request) => request.id === id);
    this.wanted = found ? "" : id;
    if (found) this.choose(found.key);
  }

  choose(key) {
    this.chosen = key;
    this.draw();
  }

  get current() {
    return this.requests.get(this.chosen) ?? [...this.requests.values()].sort((a, b) => b.begin - a.begin)[0];
  }

  draw() {
    const current = this.current;
    $("no-requests").hidden = Boolean(current);
    $("detail").hidden = !current;
    if (!current) return;
    const to = this.now;
    const from = to - 1000 * Number($("span").value);
    for (const [key, row] of this.rows) row.draw(this.requests.get(key), from, to, key === current.key);
    this.detail(current);
  }

  detail(request) {
    say($("detail-title"), request.id);
    const end = request.end ?? this.now;
    const first = firstText(request);
    const facts = [
      outcome(request),
      first ? `first text after ${duration(first - request.begin)}` : "no text yet",
      `${number(request.prompt_tokens)} prompt tokens` + (request.cached_tokens ? `, ${number(request.cached_tokens)} cached` : ""),
      `${number(request.sent_tokens)} tokens sent`,
      `${duration(end - request.begin)} in all`,
    ];
    if (request.left_out) facts.push(`${number(request.left_out)} earlier pieces only in the trace`);
    say($("detail-facts"), facts.join(" · "));
    const isWhole = $("zoom").getAttribute("aria-pressed") === "true" || !first;
    drawDetail($("detail-canvas"), request, request.begin, isWhole ? end : first + 0.06 * (first - request.begin), this.now);
    this.table(request);
  }

  table(request) {
    const rows = LANES.map((lane) => {
      const pieces = piecesOf(request, lane, this.now);
      const sum = (pick) => pieces.reduce((total, piece) => total + pick(piece), 0);
      const amount = lane.name === "decode" ? request.sent_tokens : sum((piece) => (UNCOUNTED.has(piece.kind) ? 0 : piece.units));
      return [
        lane.label,
        number(pieces.filter((piece) => piece.kind !== "queue").length),
        duration(sum((piece) => (piece.kind === "queue" ? 0 : piece.end - piece.begin))),
        duration(sum((piece) => (piece.kind === "queue" ? piece.end - piece.begin : piece.waited))),
        `${number(amount)} ${lane.unit}`,
      ];
    });
    const body = $("detail-rows");
    if (!body.children.length) body.append(...rows.map(([label, ...cells]) => make("tr", {}, make("th", { scope: "row" }, label), ...cells.map(() => make("td")))));
    rows.forEach(([, ...cells], index) => cells.forEach((cell, column) => say(body.children[index].children[column + 1], cell)));
  }

  async download() {
    const request = this.current;
    if (!request) return;
    $("download").disabled = true;
    try {
      const url = URL.createObjectURL(await getBlob(`/page/trace/${request.key}`));
      make("a", { href: url, download: `mmrt-${request.id}.json` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
      say($("detail-facts"), "The trace is downloaded: open it in https://ui.perfetto.dev.");
    } catch (error) {
      say($("detail-facts"), `No trace: ${error.message}`);
    } finally {
      $("download").disabled = false;
    }
  }
}

const firstText = (request) => request.marks.find(([text]) => text === "first text")?.[1];

const STOPPED = 499; // the client went away

function outcome(request) {
  if (request.lost) return "its gateway ended";
  if (request.status === STOPPED) return "stopped";
  if (request.status) return `ended with ${request.status}`;
  return request.end ? "done" : request.stages.at(-1)[0];
}

// The pieces of a lane: {kind, begin, end, waited, units}.
function piecesOf(request, lane, now) {
  const pieces = request.work
    .filter(([kind]) => lane.kinds.includes(kind))
    .map(([kind, begin, end, waited, units]) => ({ kind, begin, end, waited, units }));
  for (const [name, begin, end] of request.stages) {
    const kind = name === "decoding" ? "decode" : name === "submitted" || name === "queued" ? "queue" : "";
    if (lane.kinds.includes(kind)) pieces.push({ kind, begin, end: end ?? request.end ?? now, waited: 0, units: 0 });
  }
  return pieces;
}

// Fit a canvas to its place and the screen; return its context and size in CSS pixels.
function prepare(canvas, height) {
  const width = Math.max(1, canvas.clientWidth);
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

function drawPieces(context, pieces, lane, place, y, height) {
  for (const piece of pieces) {
    const left = Math.floor(place(piece.begin)); // whole pixels: sharp, and short pieces keep their colour
    context.fillStyle = color(piece.kind === "queue" ? "faint" : lane.name);
    context.globalAlpha = piece.kind === "analyse" || piece.kind === "queue" ? 0.45 : 1;
    context.fillRect(left, y, Math.max(2, Math.round(place(piece.end) - left)), height);
  }
  context.globalAlpha = 1;
}

class Row {
  constructor(request, choose) {
    this.text = make("span", { class: "id" }, request.id.slice(-8));
    this.facts = make("span", { class: "number" });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.button = make("button", { type: "button", "aria-pressed": "false", title: request.id, onclick: choose }, this.text, this.canvas, this.facts);
    this.element = make("li", {}, this.button);
  }

  draw(request, from, to, isCurrent) {
    const first = firstText(request);
    toggle(this.button, "aria-pressed", isCurrent);
    const hasFailed = request.status && request.status !== STOPPED;
    toggle(this.element, "data-state", hasFailed ? "failed" : request.end ? "done" : "live");
    say(this.facts, hasFailed ? String(request.status) : request.lost ? "moved" : first ? duration(first - request.begin) : outcome(request));
    const { context, width } = prepare(this.canvas, ROW_HEIGHT);
    const place = (at) => ((Math.min(to, Math.max(from, at)) - from) / (to - from)) * width;
    const height = ROW_HEIGHT / LANES.length;
    LANES.forEach((lane, index) => {
      const pieces = piecesOf(request, lane, to).filter((piece) => piece.end >= from);
      drawPieces(context, pieces, lane, place, index * height + 0.5, height - 1);
    });
  }
}

function drawDetail(canvas, request, from, to, now) {
  const height = LANES.length * 22 + 22;
  const { context, width } = prepare(canvas, height);
  const labels = width > 420 ? LABEL_WIDTH : 74;
  const place = (at) => labels + ((Math.min(to, Math.max(from, at)) - from) / Math.max(1e-6, to - from)) * (width - labels - 8);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const step = tick((to - from) / Math.max(2, (width - labels) / 90));
  for (let at = 0; at <= to - from; at += step) {
    context.fillStyle = color("line");
    context.fillRect(place(from + at), 0, 1, height - 20);
    context.fillStyle = color("soft");
    context.textAlign = at ? "center" : "left";
    if (place(from + at) < width - 20) context.fillText(duration(at), place(from + at), height - 9);
  }
  context.textAlign = "left";
  LANES.forEach((lane, index) => {
    const y = index * 22;
    context.fillStyle = color("soft");
    context.fillText(lane.label, 0, y + 11, labels - 8);
    drawPieces(context, piecesOf(request, lane, now).filter((piece) => piece.begin <= to), lane, place, y + 4, 14);
  });
  const first = firstText(request);
  if (first && first <= to) {
    context.fillStyle = color("text");
    context.fillRect(place(first) - 0.5, 0, 1.5, height - 20);
  }
}

// The least of 1, 2, 5, 10, … that is no less than `least`.
function tick(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1e-3, least)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}
