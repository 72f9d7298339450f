// An answer as it comes, with its times.

import { duration, make, number, say } from "./dom.js";
import { Markdown } from "./markdown.js";

export class Answer {
  // `around(change)`: calls `change`, which makes the answer longer.
  constructor(around) {
    this.around = around;
    this.shown = make("div", { class: "text" });
    this.meta = make("p", { class: "meta" }, " ");
    this.element = make("article", { class: "turn answer", "aria-label": "Answer", "aria-busy": "true" }, this.shown, this.meta);
    this.markdown = new Markdown(this.shown, around);
    this.id = "";
    this.finish = "";
    this.usage = null;
    this.first = this.last = this.longest = 0;
  }

  get text() {
    return this.markdown.text;
  }

  // Show how far the files are; `what`: "reading" or "sending".
  tell(what, share) {
    const percent = Math.floor(100 * share);
    const said = what === "sending" && percent === 100 ? "the server reads the files" : `${what} files: ${percent} %`;
    if (!this.bar) {
      this.bar = make("progress", { max: 100, "aria-label": "Files on their way" });
      this.label = make("span");
      this.meta.replaceChildren(this.bar, " ", this.label);
    }
    this.bar.value = what === "reading" ? percent / 4 : 25 + 0.75 * percent; // reading is the shorter part
    say(this.label, said);
  }

  start() {
    this.began = performance.now();
  }

  take(chunk) {
    const choice = chunk.choices[0];
    this.id = chunk.id;
    this.usage = chunk.usage ?? this.usage;
    this.finish = choice?.finish_reason ?? this.finish;
    const thoughts = choice?.delta.reasoning_content;
    const text = choice?.delta.content;
    if (!text && !thoughts) return;
    const now = performance.now();
    if (!this.first) this.meta.replaceChildren(" "); // the files have arrived
    if (this.first) this.longest = Math.max(this.longest, now - this.last);
    this.first ||= now;
    this.last = now;
    if (thoughts) this.think(thoughts);
    if (text) this.markdown.append(text);
  }

  // Show thoughts above the answer, as plain text; closed once the reader closes them.
  think(thoughts) {
    this.around(() => {
      if (!this.thoughts) {
        this.thoughts = make("p", { class: "thoughts" });
        this.element.prepend(make("details", { open: "" }, make("summary", {}, "Thoughts"), this.thoughts));
      }
      this.thoughts.append(thoughts);
    });
  }

  // What is known of the answer at its end, as one line.
  facts(how) {
    const facts = [];
    if (this.first) facts.push(`first text ${duration(this.first - this.began)}`);
    if (this.usage) facts.push(`${number(this.usage.completion_tokens)} tokens`);
    const tokens = this.usage?.completion_tokens ?? 0;
    if (tokens > 8 && this.last > this.first) facts.push(`${number((1000 * (tokens - 1)) / (this.last - this.first))} per second`);
    if (this.longest) facts.push(`longest pause ${duration(this.longest)}`);
    if (this.usage?.prompt_tokens_details?.cached_tokens) facts.push(`${number(this.usage.prompt_tokens_details.cached_tokens)} prompt tokens cached`);
    return [...facts, how].join(" · ");
  }
}
