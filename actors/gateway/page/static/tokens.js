// Markdown to tokens, by marked (vendored), within bounds: an answer can hold anything, and must not hold up the page.

import { Lexer, Marked } from "./vendor/marked.esm.js";

const MAX_TEXT = 200_000; // characters; longer texts are one plain block
const MAX_INLINE = 3_000; // characters of a paragraph or cell that are searched for marks: the search is quadratic
const MAX_BLOCKS = 30_000; // characters of a list or quotation whose inside is searched for blocks
const MAX_DEPTH = 8; // of lists and quotations in one another
const MAX_CELLS = 20_000; // of a table
const MAX_MS = 150; // after which the rest stays plain

const plain = (text) => [{ type: "plain", raw: text, text }];

class BoundedLexer extends Lexer {
  began = performance.now();
  depth = 0;

  blockTokens(source, tokens = [], ...rest) {
    if (this.depth && (this.depth > MAX_DEPTH || source.length > MAX_BLOCKS || this.isLate())) {
      tokens.push(...plain(source));
      return tokens;
    }
    this.depth++;
    try {
      return super.blockTokens(source, tokens, ...rest);
    } finally {
      this.depth--;
    }
  }

  inlineTokens(source, tokens = []) {
    if (source.length > MAX_INLINE || this.isLate()) {
      tokens.push(...plain(source));
      return tokens;
    }
    return super.inlineTokens(source, tokens);
  }

  isLate = () => performance.now() - this.began > MAX_MS;
}

// TeX is shown as it is written, so that marks of Markdown in it are none: $x_1$, $$…$$, \(…\), \[…\].
const INLINE_FORMULA = /^(?:\$\$([^$]{1,2000})\$\$|\$(?![\s$])((?:\\.|[^$\\\n]){1,500}?)(?<!\s)\$(?!\d)|\\\(([^]{1,500}?)\\\)|\\\[([^]{1,2000}?)\\\])/;
const BLOCK_FORMULA = /^ {0,3}(?:\$\$([^$]{1,2000})\$\$|\\\[([^]{1,2000}?)\\\]) *(?:\n+|$)/;

function formula(level, pattern) {
  return {
    name: `${level}Formula`,
    level,
    start: level === "inline" ? (source) => source.match(/\$|\\[([]/)?.index : undefined,
    tokenizer(source) {
      const found = pattern.exec(source);
      if (!found) return undefined;
      return { type: `${level}Formula`, raw: found[0], text: found.slice(1).find(Boolean).trim() };
    },
  };
}

const marked = new Marked({
  gfm: true,
  breaks: true, // as people write in a chat
  extensions: [formula("block", BLOCK_FORMULA), formula("inline", INLINE_FORMULA)],
  tokenizer: {
    table(source) {
      const lines = source.slice(0, source.search(/\n *\n|$(?![^])/)).split("\n"); // each is filled up to the width of the first
      return lines.length * lines[0].split("|").length > MAX_CELLS ? undefined : false; // false: as marked does
    },
  },
});

// Return the tokens of blocks of a text. `links`: link definitions known from before, to which those of the text are added.
export function tokenize(text, links = {}) {
  if (text.length > MAX_TEXT) return plain(text);
  const lexer = new BoundedLexer({ ...marked.defaults });
  Object.assign(lexer.tokens.links, links);
  try {
    const tokens = lexer.lex(text);
    Object.assign(links, lexer.tokens.links);
    return tokens;
  } catch {
    return plain(text); // too deep for marked
  }
}
