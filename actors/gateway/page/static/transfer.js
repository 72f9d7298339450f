// Conversations as a JSON file, and back. A file is a stranger's: everything in it is checked, and gets new names.

import { Conversation, isMedium, newId, titleOf } from "./conversation.js";
import { encode, FilePart } from "./encode.js";
import { megabytes } from "./explain.js";

const FORMAT = "mmrt-conversations";
const MAX_FILE_BYTES = 256_000_000; // an import is held in memory, several times
const MAX_TURNS = 20_000;
const PIECE = 4 << 20; // characters of base64 that are decoded at once

// A Blob of the conversations, with their media. The key is no part of them. Throws an Error with a sentence if it could not be imported.
export async function exported(conversations) {
  const file = await encode({
    format: FORMAT,
    version: 1,
    conversations: conversations.map((conversation) => ({
      ...pick(conversation.record, ["title", "created", "updated", "leaf"]),
      turns: [...conversation.turns.values()].map((turn) => ({
        ...pick(turn, ["id", "parent", "role", "text", "at", "facts"]),
        media: turn.media.map(({ id }) => id),
      })),
      media: [...conversation.media().values()]
        .filter(({ blob }) => blob)
        .map((medium) => ({ ...pick(medium, ["id", "name"]), data: new FilePart(medium) })),
    })),
  });
  if (file.size <= MAX_FILE_BYTES) return file;
  const otherwise = conversations.length > 1 ? "Export conversations one by one" : "Save its largest files by a click on them, delete their turns, then export it";
  throw new Error(`This export has ${megabytes(file.size)}; at most ${megabytes(MAX_FILE_BYTES)} can be imported again. ${otherwise}.`);
}

const pick = (value, names) => Object.fromEntries(names.map((name) => [name, value[name]]));

// The conversations of a file. Throws an Error with a sentence.
export async function imported(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} has ${megabytes(file.size)}; at most ${megabytes(MAX_FILE_BYTES)} are read.`);
  let content;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON.`);
  }
  if (content?.format !== FORMAT || !Array.isArray(content.conversations)) throw new Error(`${file.name} is no export of this page.`);
  const found = [];
  for (const [at, one] of content.conversations.entries()) {
    try {
      found.push(await conversationOf(one));
    } catch (error) {
      throw new Error(`${file.name}, conversation ${at + 1}: ${error.message}`, { cause: error });
    }
  }
  return found;
}

async function conversationOf({ title, created, updated, leaf, turns, media = [] }) {
  if (!Array.isArray(turns) || turns.length > MAX_TURNS) throw new Error(`it has no list of at most ${MAX_TURNS} turns.`);
  const conversation = new Conversation({ created: time(created), updated: time(updated) });
  const blobs = new Map();
  for (const medium of media) blobs.set(text(medium.id), await mediumOf(medium));
  const ids = new Map(); // the file's to ours; a parent comes before its children
  for (const turn of turns.toSorted((a, b) => time(a.at) - time(b.at))) {
    if (!["user", "assistant"].includes(turn.role)) throw new Error("the role of a turn is neither user nor assistant.");
    if (turn.parent !== null && !ids.has(turn.parent)) throw new Error("a turn follows none of the others.");
    const own = {
      id: newId(),
      conversation: conversation.id,
      parent: turn.parent === null ? null : ids.get(turn.parent),
      role: turn.role,
      text: text(turn.text),
      media: (turn.media ?? []).map((id) => blobs.get(id)).filter(Boolean),
      at: time(turn.at),
      facts: text(turn.facts ?? "").slice(0, 300),
    };
    ids.set(text(turn.id), own.id);
    conversation.turns.set(own.id, own);
  }
  const [first] = conversation.turns.values();
  conversation.record.title = text(title ?? "").slice(0, 200) || (first ? titleOf(first) : "");
  conversation.record.leaf = ids.get(leaf) ?? [...conversation.turns.keys()].at(-1) ?? null;
  return conversation;
}

function text(value) {
  if (typeof value !== "string") throw new Error("a text in it is none.");
  return value;
}

const time = (value) => (Number.isFinite(value) ? value : Date.now());

async function mediumOf({ name, data }) {
  const [head, content] = text(data).split(",");
  const mime = head.replace(/^data:/, "").replace(/;base64$/, "");
  if (!isMedium(mime) || content === undefined) throw new Error(`${text(name).slice(0, 60)} is neither a picture, a video nor a sound.`);
  const parts = [];
  for (let at = 0; at < content.length; at += PIECE) {
    parts.push(Uint8Array.from(atob(content.slice(at, at + PIECE)), (char) => char.charCodeAt(0)));
    await new Promise((resolve) => setTimeout(resolve)); // the page goes on meanwhile
  }
  const blob = new Blob(parts, { type: mime });
  return { id: newId(), name: text(name).slice(0, 200), kind: mime.split("/")[0], mime, size: blob.size, blob };
}
