// The page: views, the key, and one poll a second of the live run while somebody looks at it.

import { getJson, getKey, setKey, setModel, whenUnauthorized } from "./api.js";
import { whenNotKept } from "./archive.js";
import { $, isWide, make, say, toggle } from "./dom.js";
import { History } from "./history.js";
import { keep, kept } from "./kept.js";
import { Pipeline } from "./pipeline.js";
import { Playground } from "./playground.js";
import { Waterfall } from "./waterfall.js";

const POLL_MS = 1000;
const HURRY_POLL_MS = 450; // for a while after a command
const HURRY_MS = 4000;
const PATIENCE_MS = 5000; // a gateway that does not answer for so long is not there

const waterfall = new Waterfall();
const pipeline = new Pipeline(hurry);
const playground = new Playground({
  showRequest(id) {
    fold(false);
    show("requests");
    waterfall.select(id);
  },
  changed: () => history.draw(),
});
const history = new History(playground);

let epoch = "";
let revision = 0;
let timer = 0;
let greeting = 0;
let hurryUntil = 0;
let isClosed = false; // the server does not show its run to us
let isPolling = false;

function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("nav [data-view]")) toggle(button, "aria-current", button.dataset.view === view);
  if (isWide()) $(view).scrollIntoView({ block: "nearest", behavior: "instant" });
  poll();
}

// Give the whole width to the conversation, or show the run beside it.
function fold(doIt) {
  $("live").toggleAttribute("data-folded", doIt);
  toggle($("fold"), "aria-expanded", !doIt);
  keep("folded", doIt);
  poll();
}

const isFolded = () => $("live").hasAttribute("data-folded");
const isLooking = () => !document.hidden && (isWide() ? !isFolded() : document.body.dataset.view !== "playground");

function setState(text, state) {
  say($("state"), text);
  toggle($("state"), "data-state", state);
}

function close(message) {
  isClosed = true;
  $("live").dataset.closed = "";
  $("closed").hidden = false;
  say($("closed"), message);
}

async function poll() {
  clearTimeout(timer);
  if (isClosed || isPolling || !isLooking()) return;
  isPolling = true;
  const key = getKey();
  try {
    const state = await getJson(`/page/state?after=${revision}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (state.unloaded) {
      setState(`not loaded: ${state.unloaded}`, "degraded");
      forgetRun();
      timer = setTimeout(poll, POLL_MS);
      return;
    }
    if (state.epoch !== epoch) {
      waterfall.reset();
      if (revision) {
        revision = 0; // another gateway counts anew
        epoch = state.epoch;
        greet(); // and may serve another model
        timer = setTimeout(poll, 0);
        return;
      }
    }
    ({ epoch, revision } = state);
    pipeline.update(state);
    $("live").dataset.ready = "";
    waterfall.update(state);
    const missing = state.actors.filter((actor) => actor.state !== "active").map((actor) => actor.name);
    setState(missing.length ? `without ${missing.join(", ")}` : "serving", missing.length ? "degraded" : "ready");
  } catch (error) {
    if ((error.status === 401 || error.status === 403) && key === getKey()) return close(error.message);
    setState("unreachable", "failed");
    pipeline.lost();
  } finally {
    isPolling = false;
  }
  timer = setTimeout(poll, performance.now() < hurryUntil ? HURRY_POLL_MS : POLL_MS);
}

// What is shown of a run is of one that has ended, or of another model.
function forgetRun() {
  epoch = "";
  revision = 0;
  waterfall.reset();
  pipeline.lost();
}

// Offer the models where the server has several; return the name of the chosen one.
function offer(models) {
  const names = models.map((model) => model.id);
  const name = names.includes(kept("model")) ? kept("model") : names[0];
  const isOneOfSeveral = names.length > 1;
  $("models").hidden = !isOneOfSeveral;
  $("model").hidden = isOneOfSeveral;
  $("models").replaceChildren(...names.map((id) => make("option", { value: id, selected: id === name }, id)));
  setModel(isOneOfSeveral ? name : "");
  return name;
}

function hurry() {
  hurryUntil = performance.now() + HURRY_MS;
  clearTimeout(timer);
  timer = setTimeout(poll, HURRY_POLL_MS);
}

// Learn the model's name; until there is one, ask again.
async function greet() {
  clearTimeout(greeting);
  try {
    const { data } = await getJson("/v1/models", { signal: AbortSignal.timeout(PATIENCE_MS) });
    const name = offer(data);
    say($("model"), name);
    document.title = `${name} – mmrt`;
    playground.model = name;
    if (!isLooking() || isClosed) setState("serving", "ready"); // else the poll says more
    playground.learn(await getJson("/page/limits"));
  } catch (error) {
    setState(error.status === 401 ? "needs a key" : "unreachable", "failed");
    if (error.status !== 401) greeting = setTimeout(greet, POLL_MS);
  }
}

// `problem`: why one is wanted.
function askForKey(problem = "") {
  if ($("key-dialog").open) return;
  say($("key-problem"), problem);
  $("key-problem").hidden = !problem;
  $("key").value = getKey();
  $("key-dialog").showModal();
  $("key").select();
}

$("key-open").addEventListener("click", () => askForKey());
$("key-dialog").addEventListener("close", () => {
  $("prompt").blur(); // Chromium gives the focus back to it, but not the keys
  $("prompt").focus();
  if ($("key-dialog").returnValue !== "save") return;
  setKey($("key").value.trim());
  isClosed = false;
  delete $("live").dataset.closed;
  $("closed").hidden = true;
  greet();
  poll();
});
whenUnauthorized(() => askForKey(getKey() ? "The server does not accept this key." : "The server wants a key."));
for (const button of document.querySelectorAll("nav [data-view]")) button.addEventListener("click", () => show(button.dataset.view));
$("models").addEventListener("change", () => {
  keep("model", $("models").value);
  forgetRun();
  greet();
  poll();
});
document.addEventListener("visibilitychange", poll);
matchMedia("(min-width: 1020px)").addEventListener("change", poll);
$("fold").addEventListener("click", () => fold(!isFolded()));
$("theme").value = kept("theme") ?? "";
$("theme").addEventListener("change", () => {
  keep("theme", $("theme").value || null);
  dispatchEvent(new Event("theme"));
});
whenNotKept((text) => playground.complain(text));

greet();
fold(kept("folded") === true);
history.begin();
$("prompt").focus();
