// The playground: the shown conversation, its questions and answers, and the branches between them.

import { Answer } from "./answer.js";
import { complete, drop, follow } from "./api.js";
import * as archive from "./archive.js";
import { toFile } from "./capture.js";
import { CodeDialog } from "./code.js";
import { Conversation, newId } from "./conversation.js";
import { $, make, say } from "./dom.js";
import { explain } from "./explain.js";
import { Attachments } from "./media.js";
import { bodyOf, problemOf } from "./request.js";
import { Settings } from "./settings.js";
import { NoAnswer, TurnView } from "./turns.js";

const SAVE_MS = 1000; // an answer that comes is written so often
const NOTICE_MS = 12_000;
const UNDER_WAY = "mmrt-under-way"; // of this tab: the answer that goes on through a reload
const MAX_NAMED_BYTES = 4 << 20; // of files: the server keeps them as long as the answer is under way

export class Playground {
  // `showRequest(id)`: show a request in the waterfall. `changed()`: the list of conversations may look different.
  constructor({ showRequest, changed }) {
    this.model = "";
    this.limits = { max_body_bytes: Infinity, kinds: ["image", "video", "audio"] }; // until the server has told
    this.conversation = new Conversation();
    this.views = new Map(); // of the conversation's turns, by id
    this.showRequest = showRequest;
    this.changed = changed;
    this.once = {}; // options of the next answer alone
    this.running = null; // the AbortController of the answer that streams
    this.failure = null; // {turn, reason, once}: the last answer, if there is none
    this.acts = {
      edit: (turn, text) => this.edit(turn, text),
      again: (turn) => this.again(turn),
      remove: (turn) => this.remove(turn),
      choose: (turn) => this.choose(turn),
      below: (turn) => this.conversation.below(turn).length,
    };
    this.settings = new Settings();
    this.attachments = new Attachments((text) => this.complain(text), () => this.limits);
    this.code = new CodeDialog((draft) => this.preview(draft), this.attachments);
    this.watch();
  }

  // `limits`: what the server takes, as {max_body_bytes, kinds}.
  learn(limits) {
    this.limits = limits;
    this.attachments.offer();
  }

  watch() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    addEventListener("keydown", (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && this.running?.abort());
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.show(new Conversation()));
    for (const button of document.querySelectorAll("[data-example]")) button.addEventListener("click", () => this.example(button.dataset.example));
  }

  // Show another conversation; an answer that streams is stopped, and stays where it belongs.
  show(conversation) {
    this.running?.abort();
    archive.release(this.conversation.media().values());
    this.conversation = conversation;
    this.views.clear();
    this.failure = null;
    this.draw();
    scrollDown(true);
    this.changed();
    $("prompt").focus({ preventScroll: true });
  }

  async example(name) {
    if (name === "picture") {
      this.attachments.add([await toFile(drawShapes(), "circle.png", "image/png")]);
      $("prompt").value = "What colour is the circle?";
    } else {
      $("prompt").value = "What can you do?";
      this.once = { ignore_eos: true, max_tokens: 1500 }; // past its end: nonsense, but it lasts
    }
    $("prompt").focus();
  }

  // `answer`: the one that has just come to be this turn.
  viewOf(turn, answer = null) {
    if (!this.views.has(turn.id)) this.views.set(turn.id, new TurnView(turn, this.acts, answer));
    return this.views.get(turn.id);
  }

  // Show the path to the chosen turn, and behind it `next`, or why there is no answer.
  draw(next = null) {
    const path = this.conversation.path();
    const views = path.map((turn) => this.viewOf(turn));
    views.forEach((view, at) => view.place(this.conversation.siblings(path[at])));
    const last = path.at(-1);
    if (!next && last?.role === "user") next = this.noAnswer(last);
    $("welcome").hidden = path.length > 0;
    const wanted = [$("welcome"), ...views.map((view) => view.element), ...(next ? [next.element] : [])];
    for (const element of [...$("turns").children]) if (!wanted.includes(element)) element.remove();
    wanted.forEach((element, at) => $("turns").children[at] !== element && $("turns").insertBefore(element, $("turns").children[at] ?? null));
  }

  noAnswer(turn) {
    const { reason, once } = this.failure?.turn === turn ? this.failure : { reason: "There is no answer.", once: {} };
    return new NoAnswer(reason, () => {
      if (this.running) return;
      this.once = once;
      this.answer(turn);
    });
  }

  async send() {
    const text = $("prompt").value.trim();
    if (this.running || (!text && !this.attachments.media.length)) return;
    if (!this.settings.check()) return;
    $("prompt").value = "";
    const media = this.attachments.take();
    const turn = this.conversation.add({ role: "user", text, media, parent: this.end() });
    this.keep([turn], media);
    await this.answer(turn);
  }

  // The turn that the next question follows: one without an answer is no part of what goes on, and stays as a branch.
  end() {
    const { last } = this.conversation;
    return last?.role === "user" ? last.parent : (last?.id ?? null);
  }

  // Ask an edited question. Returns whether it is asked; else its text must not be lost.
  edit(old, text) {
    if (this.running) {
      this.complain("An answer still comes: wait for it, or stop it, then send again.");
      return false;
    }
    if (!this.settings.check()) return false;
    const turn = this.conversation.add({ role: "user", text, media: old.media, parent: old.parent });
    this.keep([turn]);
    this.answer(turn);
    return true;
  }

  again(old) {
    if (this.running || !this.settings.check()) return;
    const question = this.conversation.turns.get(old.parent);
    if (!question) return this.complain("The question to this answer is deleted.");
    this.conversation.record.leaf = question.id;
    this.answer(question, old);
  }

  remove(turn) {
    if (this.running) return;
    archive.forget(this.conversation, this.conversation.remove(turn));
    if (!this.conversation.turns.size) return this.forget();
    this.keep();
    this.draw();
  }

  // The shown conversation is no more: show a new one.
  forget() {
    archive.forgetConversation(this.conversation);
    this.show(new Conversation());
  }

  choose(turn) {
    if (this.running) return;
    this.conversation.choose(turn);
    this.keep();
    this.draw();
    this.viewOf(turn).element.scrollIntoView({ block: "nearest" });
  }

  async keep(turns = [], media = []) {
    const { conversation } = this;
    await archive.save(conversation, turns);
    await archive.saveMedia(conversation, media);
    this.changed();
  }

  bodyFor(turns, once) {
    return bodyOf(turns, { model: this.model, system: this.settings.system, options: { ...this.settings.options(), ...once } });
  }

  // The body of the request that the prompt would send now, or of the last one. `draft`: {text, media}.
  preview(draft) {
    const isDraft = draft.text || draft.media.length;
    const path = this.conversation.path();
    const end = this.end();
    const turns = isDraft ? path.slice(0, path.findIndex((turn) => turn.id === end) + 1) : path.slice(0, path.findLastIndex((turn) => turn.role === "user") + 1);
    if (isDraft) turns.push({ role: "user", ...draft });
    if (!turns.length) turns.push({ role: "user", text: "Hello!", media: [] });
    return this.bodyFor(turns, this.once);
  }

  // Ask for an answer to a question. `old`: the answer that it shall stand beside, if it comes to nothing that is shown again.
  async answer(question, old = null) {
    const { conversation, once } = this; // a new chat has others
    const answer = this.newAnswer();
    this.once = {};
    this.failure = null;
    this.draw(answer);
    scrollDown(true);
    await this.run(conversation, question, answer, { once, old, ask: this.asking(conversation, question, once, answer) });
  }

  // Go on with the answer that was under way before a reload of this tab.
  async resume() {
    const { name, id, parent } = JSON.parse(sessionStorage.getItem(UNDER_WAY) ?? "{}");
    const { conversation } = this;
    const question = conversation.id === id && conversation.turns.get(parent);
    if (!question || this.running) return;
    let chunks;
    const following = (this.running = new AbortController());
    const ask = {
      name,
      body: {},
      chunks: (signal) => {
        signal.addEventListener("abort", () => following.abort());
        return chunks;
      },
    };
    try {
      chunks = await follow(name, { signal: following.signal });
    } catch {
      return sessionStorage.removeItem(UNDER_WAY); // it is not kept any more
    } finally {
      this.running = null;
    }
    if (conversation !== this.conversation) return drop(name);
    const part = conversation.children(question.id).findLast((turn) => turn.role === "assistant" && !turn.facts);
    if (part) {
      archive.forget(conversation, conversation.remove(part));
      this.views.delete(part.id);
    }
    conversation.record.leaf = question.id;
    const answer = this.newAnswer();
    this.draw(answer);
    scrollDown(true);
    await this.run(conversation, question, answer, { once: {}, old: null, ask });
  }

  newAnswer() {
    return new Answer((change) => {
      const isDown = isScrolledDown();
      change();
      scrollDown(isDown);
    });
  }

  // What is asked: {name, body, chunks(signal)}. Raises what makes that impossible.
  asking(conversation, question, once, answer) {
    const turns = conversation.pathTo(question);
    const problem = problemOf(turns, this.limits.max_body_bytes);
    if (problem) return { name: "", body: {}, problem };
    const body = this.bodyFor(turns, once);
    const media = turns.flatMap((turn) => turn.media);
    const isNamed = body.stream && media.reduce((sum, medium) => sum + medium.size, 0) <= MAX_NAMED_BYTES;
    const name = isNamed ? newId() : "";
    const tell = (what, share) => answer.tell(what, share);
    return { name, body, chunks: (signal) => complete(body, { signal, hasFiles: media.length > 0, tell, name }) };
  }

  // `ask`: as `asking` has it.
  async run(conversation, question, answer, { once, old, ask }) {
    const keeper = new Keeper(conversation, question);
    if (ask.name) sessionStorage.setItem(UNDER_WAY, JSON.stringify({ name: ask.name, id: conversation.id, parent: question.id }));
    const { error, messages } = await this.stream(ask, answer, keeper);
    if (ask.name && error?.status !== 0) sessionStorage.removeItem(UNDER_WAY); // where the connection broke, it may go on: a reload asks
    if (ask.name && error?.name === "AbortError") drop(ask.name);
    answer.markdown.finish();
    const reason = error && error.name !== "AbortError" ? explain(error, messages) : "";
    const turn = keeper.end(answer.text, answer.facts(reason ? `failed: ${reason}` : error ? "stopped" : answer.finish));
    if (!turn && reason) this.failure = { turn: question, reason, once };
    if (!turn && !reason && old) conversation.choose(old);
    await this.ended(conversation, answer, turn, reason);
  }

  // Returns {error, messages} of the request.
  async stream(ask, answer, keeper) {
    const running = (this.running = new AbortController());
    $("playground").dataset.running = "";
    $("send").hidden = true;
    $("stop").hidden = false;
    try {
      if (ask.problem) throw new Error(ask.problem);
      answer.start();
      for await (const chunk of ask.chunks(running.signal)) {
        answer.take(chunk);
        keeper.look(answer.text);
      }
      return {};
    } catch (error) {
      return { error, messages: ask.body.messages };
    } finally {
      this.running = null;
      delete $("playground").dataset.running;
      $("send").hidden = false;
      $("stop").hidden = true;
    }
  }

  async ended(conversation, answer, turn, reason) {
    const isDown = isScrolledDown();
    if (conversation === this.conversation) {
      const view = turn && this.viewOf(turn, answer);
      this.draw();
      if (turn && answer.id) view.link(() => this.showRequest(answer.id));
      if (!document.querySelector(".editor")) $("prompt").focus({ preventScroll: true });
    }
    scrollDown(isDown);
    say($("announcer"), reason ? "" : `Answer: ${answer.text}`);
    this.changed();
  }

  complain(text) {
    const notice = make("p", { class: "error", role: "alert" }, text);
    $("notices").append(notice);
    setTimeout(() => notice.remove(), NOTICE_MS);
  }
}

// Writes an answer to the conversation while it comes, so that a reload keeps what there is.
class Keeper {
  constructor(conversation, question) {
    this.conversation = conversation;
    this.question = question;
    this.turn = null;
    this.saved = performance.now();
  }

  look(text) {
    if (!text || performance.now() - this.saved < SAVE_MS) return;
    this.write(text, "");
  }

  write(text, facts) {
    this.saved = performance.now();
    this.turn ??= this.conversation.add({ role: "assistant", text, parent: this.question.id });
    Object.assign(this.turn, { text, facts });
    archive.save(this.conversation, [this.turn]);
  }

  // The turn, or null if no text has come.
  end(text, facts) {
    if (text) this.write(text, facts);
    return this.turn;
  }
}

const isScrolledDown = () => $("turns").scrollHeight - $("turns").scrollTop - $("turns").clientHeight < 60;

function scrollDown(doIt) {
  if (doIt) $("turns").scrollTop = $("turns").scrollHeight;
}

// A picture to ask about: a red circle and a blue square.
function drawShapes() {
  const canvas = make("canvas", { width: 224, height: 224 });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, 224, 224);
  context.fillStyle = "#e01b24";
  context.beginPath();
  context.arc(72, 112, 44, 0, 2 * Math.PI);
  context.fill();
  context.fillStyle = "#1c5fd0";
  context.fillRect(136, 76, 68, 68);
  return canvas;
}
