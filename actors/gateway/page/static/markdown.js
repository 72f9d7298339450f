// An answer's Markdown as elements, made one by one from marked's tokens: nothing is ever parsed as HTML. Markup in an answer is
// shown as text; pictures become links, so that an answer loads nothing; links lead to http, https and mail alone.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { tokenize } from "./tokens.js";

const LEAST_MS = 25; // between two renderings of a text that comes
const REST = 3; // times as long as a rendering takes, nothing is rendered
const MAX_ELEMENTS = 20_000; // of a block; what follows is one plain text
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…", mdash: "—", ndash: "–", times: "×", rarr: "→", larr: "←", deg: "°", middot: "·", bull: "•", le: "≤", ge: "≥", ne: "≠" };

// Shows a text in an element, whole or as it comes. What stands for good is not touched again: selections in it stay.
export class Markdown {
  // `around(change)` calls `change`, which alters the element.
  constructor(element, around = (change) => change()) {
    this.element = element;
    this.around = around;
    this.text = "";
    this.blocks = []; // {raw, element}, in order
    this.settled = 0; // as many of the blocks will stay as they are
    this.length = 0; // of the text of those
    this.links = {};
    this.timer = 0;
    this.rest = 0;
  }

  append(text) {
    this.text += text;
    this.timer ||= setTimeout(() => this.render(), Math.max(LEAST_MS, this.rest));
  }

  // The text is whole: definitions of links at its end count everywhere.
  finish() {
    clearTimeout(this.timer);
    this.settled = this.length = 0;
    const before = Object.keys(this.links).length;
    const tokens = tokenize(this.text, this.links);
    this.around(() => this.show(tokens, Object.keys(this.links).length === before));
  }

  render() {
    this.timer = 0;
    const began = performance.now();
    const tokens = tokenize(this.text.slice(this.length), this.links);
    this.around(() => this.show(tokens, true));
    for (const { raw } of tokens.slice(0, -2)) {
      if (!this.text.startsWith(raw, this.length)) break; // marked has altered it (tabs): it is read again
      this.length += raw.length;
      this.settled++;
    }
    this.rest = REST * (performance.now() - began);
  }

  // Put the elements of the tokens behind the settled ones; those of equal text are kept.
  show(tokens, mayKeep) {
    let at = this.settled;
    for (const token of tokens) {
      const old = this.blocks[at];
      if (!(mayKeep && old?.raw === token.raw)) {
        const element = new Builder().block(token);
        if (old) old.element.replaceWith(element);
        else this.element.append(element);
        this.blocks[at] = { raw: token.raw, element };
      }
      at++;
    }
    for (const { element } of this.blocks.splice(at)) element.remove();
  }
}

const decode = (text) =>
  text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,8}));/g, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(NAMED, name) ? NAMED[name] : whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });

// The address of a link as it may be followed, or null.
function address(href) {
  const url = URL.parse?.(decode(href)) ?? parseUrl(decode(href));
  return url && ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

function parseUrl(text) {
  try {
    return new URL(text);
  } catch {
    return null;
  }
}

// Makes the elements of one block.
class Builder {
  left = MAX_ELEMENTS;

  block(token) {
    const build = this.blocks[token.type];
    if (!build || --this.left < 0) return make("p", { class: "plain" }, (token.text ?? token.raw).trimEnd());
    return build(token);
  }

  all = (tokens) => tokens.map((token) => this.block(token));
  inside = (tokens) => tokens.map((token) => (--this.left < 0 ? token.raw : (this.spans[token.type]?.(token) ?? token.raw)));

  blocks = {
    space: () => document.createComment(""),
    def: () => document.createComment(""),
    hr: () => make("hr"),
    heading: ({ depth, tokens }) => make(`h${Math.min(6, depth + 2)}`, { "data-depth": depth }, ...this.inside(tokens)),
    paragraph: ({ tokens }) => make("p", {}, ...this.inside(tokens)),
    text: (token) => make("span", {}, ...(token.tokens ? this.inside(token.tokens) : [decode(token.text)])), // of a tight list
    blockquote: ({ tokens }) => make("blockquote", {}, ...this.all(tokens)),
    list: ({ ordered, start, items }) =>
      make(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {}, ...items.map(({ tokens }) => make("li", {}, ...this.all(tokens)))),
    checkbox: (token) => this.spans.checkbox(token),
    code: ({ text, lang }) => {
      const name = (lang ?? "").split(/\s/)[0].slice(0, 30);
      const head = make("div", { class: "code-head" }, make("span", {}, name || "text"), copyButton("Copy code", () => text));
      return make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, make("code", {}, text)));
    },
    table: ({ header, rows }) => {
      const cell = (tag) => (one) => make(tag, { "data-align": one.align }, ...this.inside(one.tokens));
      const body = rows.map((row) => make("tr", {}, ...row.map(cell("td"))));
      const table = make("table", {}, make("thead", {}, make("tr", {}, ...header.map(cell("th")))), make("tbody", {}, ...body));
      return make("div", { class: "wide", tabindex: 0 }, table);
    },
    blockFormula: ({ text }) => make("pre", { class: "formula", tabindex: 0 }, text),
  };

  spans = {
    text: (token) => (token.tokens ? make("span", {}, ...this.inside(token.tokens)) : decode(token.text)),
    escape: ({ text }) => decode(text),
    strong: ({ tokens }) => make("strong", {}, ...this.inside(tokens)),
    em: ({ tokens }) => make("em", {}, ...this.inside(tokens)),
    del: ({ tokens }) => make("del", {}, ...this.inside(tokens)),
    codespan: ({ text }) => make("code", {}, text),
    br: () => make("br"),
    html: ({ raw }) => (/^<br *\/?>$/i.test(raw) ? make("br") : raw),
    checkbox: ({ checked }) => make("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" }),
    link: ({ href, tokens, raw }) => this.link(href, this.inside(tokens), raw),
    image: ({ href, text, raw }) => this.link(href, [`picture: ${text || href.slice(0, 60)}`], raw),
    inlineFormula: ({ text }) => make("code", { class: "formula" }, text),
  };

  link(href, children, raw) {
    const url = address(href);
    if (!url) return raw; // as it is written
    return make("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
  }
}
