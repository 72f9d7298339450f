// The playground: a conversation with media, streamed; sampling and guidance; the request as code.

import { complete, getKey } from "./api.js";
import { $, dialogButtons, duration, make, number, say, toggle } from "./dom.js";
import { formFields, watchForm } from "./forms.js";
import { Attachments, dataUrl, preview, toFile } from "./media.js";
import { asCurl, asPython } from "./snippets.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "guidance_scale",
];

export class Playground {
  // `showRequest(id)`: show a request in the waterfall.
  constructor(showRequest) {
    this.model = "";
    this.turns = []; // {role, text, media}
    this.showRequest = showRequest;
    this.once = {}; // options of the next answer alone
    this.running = null; // the AbortController of the answer that streams
    this.failed = null; // the last answer, if it failed
    this.attachments = new Attachments((text) => this.complain(text));
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
    $("clear").addEventListener("click", () => this.clear());
    $("settings-open").addEventListener("click", () => this.showSettings($("settings").hidden));
    for (const button of document.querySelectorAll("[data-example]")) button.addEventListener("click", () => this.example(button.dataset.example));
    watchForm($("composer").elements);
    this.watchCode();
  }

  showSettings(doIt) {
    $("settings").hidden = !doIt;
    toggle($("settings-open"), "aria-expanded", doIt);
  }

  clear() {
    this.running?.abort();
    for (const { url } of this.turns.flatMap((turn) => turn.media)) URL.revokeObjectURL(url);
    this.turns = [];
    this.failed = null;
    $("turns").replaceChildren($("welcome"));
    $("welcome").hidden = false;
    $("prompt").focus();
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

  // The fields of a request that the settings give; what is left empty is the server's default.
  options() {
    const { elements } = $("composer");
    const options = {};
    for (const name of NUMBERS) if (elements[name].value !== "") options[name] = Number(elements[name].value);
    if (elements.negative_prompt.value) options.negative_prompt = elements.negative_prompt.value;
    const stop = elements.stop.value.split("\n").filter(Boolean);
    if (stop.length) options.stop = stop;
    if (elements.ignore_eos.checked) options.ignore_eos = true;
    Object.assign(options, formFields(elements));
    options.stream = elements.stream.checked;
    if (options.stream) options.stream_options = { include_usage: true };
    return options;
  }

  // The body of a request for these turns, with the options of this one alone, and `url(medium)` for what a medium's part holds.
  async body(turns, once, url) {
    const messages = [];
    const system = $("composer").elements.system.value;
    if (system) messages.push({ role: "system", content: system });
    for (const { role, text, media } of turns) {
      const parts = await Promise.all(media.map(async (medium) => ({ type: `${medium.kind}_url`, [`${medium.kind}_url`]: await url(medium) })));
      messages.push({ role, content: parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text });
    }
    return { ...(this.model && { model: this.model }), messages, ...this.options(), ...once };
  }

  async send() {
    const text = $("prompt").value.trim();
    if (this.running || (!text && !this.attachments.media.length)) return;
    if (!$("composer").checkValidity()) this.showSettings(true); // the browser complains about what it can show
    if (!$("composer").reportValidity()) return;
    this.forgetFailure();
    const turn = { role: "user", text, media: this.attachments.take() };
    $("prompt").value = "";
    this.turns.push(turn);
    $("welcome").hidden = true;
    const shown = make("ul", { class: "attachments" }, ...turn.media.map((medium) => preview(medium)));
    $("turns").append(make("article", { class: "turn user", "aria-label": "You" }, ...(turn.media.length ? [shown] : []), make("p", {}, text)));
    await this.answer();
  }

  // A question without an answer is no part of the conversation when that goes on.
  forgetFailure() {
    if (!this.failed) return;
    this.turns.pop();
    this.failed.withdraw();
    this.failed = null;
  }

  async answer() {
    const { turns, once } = this; // a new chat has others
    const answer = new Answer();
    this.once = {};
    $("turns").append(answer.element);
    scrollDown(true);
    this.running = new AbortController();
    $("send").hidden = true;
    $("stop").hidden = false;
    try {
      const url = async (medium) => ({ url: await dataUrl(medium) });
      const body = await this.body(turns, once, url);
      answer.start();
      for await (const chunk of complete(body, this.running.signal)) answer.take(chunk);
      answer.end(answer.finish);
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped");
      else answer.fail(error.message, () => this.retry(answer, once));
    } finally {
      this.running = null;
      $("send").hidden = false;
      $("stop").hidden = true;
      $("prompt").focus({ preventScroll: true });
    }
    if (answer.id) answer.link(this.showRequest);
    if (answer.hasFailed && turns === this.turns) this.failed = answer;
    if (!answer.hasFailed && answer.text.data) turns.push({ role: "assistant", text: answer.text.data, media: [] });
    say($("announcer"), answer.hasFailed ? "" : `Answer: ${answer.text.data}`);
  }

  retry(answer, once) {
    if (this.running) return;
    answer.element.remove();
    this.failed = null;
    this.once = once;
    this.answer();
  }

  complain(text) {
    const notice = make("p", { class: "error", role: "alert" }, text);
    $("turns").append(notice);
    scrollDown(true);
    setTimeout(() => notice.remove(), 8000);
  }

  watchCode() {
    const dialog = $("code-dialog");
    const languages = [...dialog.querySelectorAll("[data-language]")];
    let codes = {};
    const show = (language) => {
      say($("code"), codes[language]);
      for (const button of languages) toggle(button, "aria-pressed", button.dataset.language === language);
    };
    dialogButtons(dialog);
    for (const button of languages) button.addEventListener("click", () => show(button.dataset.language));
    $("code-open").addEventListener("click", async () => {
      const draft = { role: "user", text: $("prompt").value.trim(), media: this.attachments.media };
      const isDraft = draft.text || draft.media.length;
      const last = this.turns.findLastIndex((turn) => turn.role === "user");
      const turns = isDraft ? [...this.turns.slice(0, this.failed ? -1 : undefined), draft] : this.turns.slice(0, last + 1);
      if (!turns.length) turns.push({ role: "user", text: "Hello!", media: [] });
      const body = await this.body(turns, this.once, (medium) => ({ medium: { name: medium.name, mime: medium.mime } }));
      codes = { curl: asCurl(body, location.origin, getKey()), python: asPython(body, location.origin, getKey()) };
      const files = turns.flatMap((turn) => turn.media).map((medium) => medium.name);
      say($("code-note"), files.length ? `It reads ${[...new Set(files)].join(", ")} from the current directory.` : "");
      show("curl");
      say($("code-copy"), "Copy");
      dialog.showModal();
    });
    $("code-copy").addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText($("code").textContent);
        say($("code-copy"), "Copied");
      } catch {
        getSelection().selectAllChildren($("code"));
        say($("code-copy"), "Press Ctrl-C");
      }
    });
  }
}

// An answer as it comes, with its times.
class Answer {
  constructor() {
    this.text = document.createTextNode("");
    this.meta = make("p", { class: "meta" }, " ");
    this.element = make("article", { class: "turn answer", "aria-label": "Answer", "aria-busy": "true" }, make("p", { class: "text" }, this.text), this.meta);
    this.id = "";
    this.finish = "";
    this.usage = null;
    this.hasFailed = false;
    this.first = this.last = this.longest = 0;
  }

  start() {
    this.began = performance.now();
  }

  take(chunk) {
    const choice = chunk.choices[0];
    this.id = chunk.id;
    this.usage = chunk.usage ?? this.usage;
    this.finish = choice?.finish_reason ?? this.finish;
    const text = choice?.delta.content;
    if (!text) return;
    const now = performance.now();
    if (this.first) this.longest = Math.max(this.longest, now - this.last);
    this.first ||= now;
    this.last = now;
    const isDown = isScrolledDown();
    this.text.appendData(text);
    scrollDown(isDown);
  }

  end(how) {
    this.element.removeAttribute("aria-busy");
    const facts = [];
    if (this.first) facts.push(`first text ${duration(this.first - this.began)}`);
    if (this.usage) facts.push(`${number(this.usage.completion_tokens)} tokens`);
    const tokens = this.usage?.completion_tokens ?? 0;
    if (tokens > 8 && this.last > this.first) facts.push(`${number((1000 * (tokens - 1)) / (this.last - this.first))} per second`);
    if (this.longest) facts.push(`longest pause ${duration(this.longest)}`);
    if (this.usage?.prompt_tokens_details?.cached_tokens) facts.push(`${number(this.usage.prompt_tokens_details.cached_tokens)} prompt tokens cached`);
    facts.push(how);
    const isDown = isScrolledDown();
    say(this.meta, facts.join(" · "));
    scrollDown(isDown);
  }

  link(show) {
    this.meta.append(" ", make("button", { type: "button", class: "link", onclick: () => show(this.id) }, "waterfall"));
    scrollDown(isScrolledDown());
  }

  fail(message, retry) {
    this.hasFailed = true;
    this.end("failed");
    this.meta.remove();
    this.again = make("div", { class: "row" }, make("button", { type: "button", onclick: retry }, "Try again"));
    this.element.append(make("p", { class: "error", role: "alert" }, message), this.again);
    scrollDown(true);
  }

  withdraw() {
    this.again.remove();
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
