// One turn of a conversation on the page: what was asked or answered, and what can be done with it.

import { copyButton } from "./clipboard.js";
import { icon, make } from "./dom.js";
import { Markdown } from "./markdown.js";
import { preview } from "./media.js";

const SURE_MS = 4000;

const tool = (name, label, onclick) => make("button", { type: "button", class: "quiet tool", "aria-label": label, title: label, onclick }, icon(name));

// `acts`: {edit(turn, text), again(turn), remove(turn), choose(turn), below(turn)}, what the page does with a turn. `edit` returns whether
// it took the text.
export class TurnView {
  // `answer`: the Answer that has just come, whose elements stay.
  constructor(turn, acts, answer = null) {
    this.turn = turn;
    this.acts = acts;
    this.branches = make("span", { class: "branches" });
    this.element = turn.role === "user" ? this.question() : this.answer(answer ?? new OldAnswer(turn));
  }

  question() {
    const { text, media } = this.turn;
    this.body = make("div", {}, ...(media.length ? [make("ul", { class: "attachments" }, ...media.map((medium) => preview(medium)))] : []), make("p", {}, text));
    return make(
      "article",
      { class: "turn user", "aria-label": "You" },
      this.body,
      this.tools(tool("edit", "Edit and ask again", () => this.edit())),
    );
  }

  answer({ element, meta }) {
    const { facts } = this.turn;
    meta.replaceChildren(facts || "interrupted");
    meta.classList.toggle("error", facts.startsWith("failed"));
    element.removeAttribute("aria-busy");
    element.append(this.tools(tool("again", "Answer again", () => this.acts.again(this.turn))));
    return element;
  }

  tools(own) {
    return make("div", { class: "tools" }, this.branches, copyButton("Copy", () => this.turn.text), own, this.remover());
  }

  // Deleting is for good: ask once more, in the same place.
  remover() {
    const button = tool("remove", "Delete", () => {
      if (button.dataset.sure !== undefined) return this.acts.remove(this.turn);
      const count = this.acts.below(this.turn);
      button.dataset.sure = "";
      button.replaceChildren(count > 1 ? `Delete ${count} turns?` : "Delete?");
      setTimeout(() => {
        delete button.dataset.sure;
        button.replaceChildren(icon("remove"));
      }, SURE_MS);
    });
    return button;
  }

  // Show which of its siblings it is.
  place(siblings) {
    if (siblings.length < 2) return this.branches.replaceChildren();
    const at = siblings.indexOf(this.turn);
    const step = (name, label, to) => {
      const button = tool(name, label, () => this.acts.choose(siblings[to]));
      button.disabled = !siblings[to];
      return button;
    };
    this.branches.replaceChildren(
      step("back", "Earlier branch", at - 1),
      make("span", { class: "number" }, `${at + 1}/${siblings.length}`),
      step("forth", "Later branch", at + 1),
    );
  }

  edit() {
    if (this.editor) return;
    const box = make("textarea", { rows: 3, "aria-label": "Your message" });
    box.value = this.turn.text;
    const close = () => {
      this.editor.replaceWith(this.body);
      this.editor = null;
    };
    const send = () => {
      const text = box.value.trim();
      if (!text && !this.turn.media.length) return box.focus();
      if (this.acts.edit(this.turn, text)) close();
    };
    box.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const buttons = make(
      "div",
      { class: "row" },
      make("span", { class: "gap" }),
      make("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
      make("button", { type: "button", class: "primary", onclick: send }, "Send"),
    );
    this.editor = make("div", { class: "editor" }, box, buttons);
    this.body.replaceWith(this.editor);
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }

  // Lead from the answer to its request in the waterfall.
  link(show) {
    this.element.querySelector(".meta").append(" ", make("button", { type: "button", class: "link", onclick: show }, "waterfall"));
  }
}

class OldAnswer {
  constructor({ text }) {
    const shown = make("div", { class: "text" });
    const markdown = new Markdown(shown);
    markdown.append(text);
    markdown.finish();
    this.meta = make("p", { class: "meta" });
    this.element = make("article", { class: "turn answer", "aria-label": "Answer" }, shown, this.meta);
  }
}

// Stands for an answer that there is not, with the reason and another try.
export class NoAnswer {
  constructor(reason, retry) {
    this.element = make(
      "article",
      { class: "turn answer", "aria-label": "No answer" },
      make("p", { class: "error", role: "alert" }, reason),
      make("div", { class: "row" }, make("button", { type: "button", onclick: retry }, "Try again")),
    );
  }
}
