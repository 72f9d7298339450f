// A conversation as a tree of turns: an edited question or another answer begins a branch, and earlier branches stay. No I/O.

const MAX_TITLE = 60;
const MEDIA = /^(image|video|audio)\/(?!svg)[\w.+-]{1,60}$/;

// Whether files of this type can be part of a turn.
export const isMedium = (mime) => MEDIA.test(mime);

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// A turn: {id, conversation, parent, role, text, media: [{id, name, kind, mime, size}], at, facts}. The parent of a first one is null.
export class Conversation {
  constructor(record = {}, turns = []) {
    const now = Date.now();
    this.record = { id: newId(), title: "", created: now, updated: now, leaf: null, ...record };
    this.turns = new Map(turns.sort((a, b) => a.at - b.at).map((turn) => [turn.id, turn]));
  }

  get id() {
    return this.record.id;
  }

  // The shown turns, from the first to the chosen last one.
  path() {
    const turns = [];
    for (let turn = this.turns.get(this.record.leaf); turn && turns.length <= this.turns.size; turn = this.turns.get(turn.parent)) turns.unshift(turn);
    return turns;
  }

  pathTo(turn) {
    const path = this.path();
    return path.slice(0, path.indexOf(turn) + 1);
  }

  get last() {
    return this.turns.get(this.record.leaf) ?? null;
  }

  add({ role, text, media = [], parent, facts = "" }) {
    const newest = Math.max(0, ...[...this.turns.values()].map((turn) => turn.at));
    const turn = { id: newId(), conversation: this.id, parent, role, text, media, at: Math.max(Date.now(), newest + 1), facts };
    this.turns.set(turn.id, turn);
    this.record.title ||= titleOf(turn);
    this.record.leaf = turn.id;
    this.record.updated = Date.now();
    return turn;
  }

  children(id) {
    return [...this.turns.values()].filter((turn) => turn.parent === id);
  }

  // The turns in whose place this one is shown, in order, itself among them.
  siblings(turn) {
    return this.children(turn.parent);
  }

  // Show this turn, and below it the newest of each.
  choose(turn) {
    for (let next = turn; next; next = this.children(next.id).at(-1)) this.record.leaf = next.id;
  }

  below(turn) {
    return [turn, ...this.children(turn.id).flatMap((child) => this.below(child))];
  }

  // Forget a turn and all below it; show a sibling, or what was before. Returns the forgotten ones.
  remove(turn) {
    const gone = this.below(turn);
    for (const { id } of gone) this.turns.delete(id);
    const sibling = this.siblings(turn).at(-1);
    if (sibling) this.choose(sibling);
    else this.record.leaf = turn.parent;
    return gone;
  }

  // The media that a turn names, each once.
  media() {
    return new Map([...this.turns.values()].flatMap((turn) => turn.media).map((medium) => [medium.id, medium]));
  }
}

export function titleOf({ text, media }) {
  const line = text.trim().split("\n")[0] || media.map((medium) => medium.name).join(", ");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}
