// Conversations between memory and the store. Media are held as {id, name, kind, mime, size, blob, url}; stored turns name them alone.

import { Conversation } from "./conversation.js";
import * as store from "./store.js";

let complain = () => {};
let hasComplained = false;

// `tell(text)` is called once if the browser keeps nothing.
export const whenNotKept = (tell) => (complain = tell);

async function tried(work, otherwise) {
  try {
    return await work;
  } catch (error) {
    if (!hasComplained) complain(`This browser does not keep conversations (${error.message}). They end with this tab: export what you need.`);
    hasComplained = true;
    return otherwise;
  }
}

export const list = () => tried(store.list(), []);

const named = ({ id, name, kind, mime, size }) => ({ id, name, kind, mime, size });
const stripped = (turn) => ({ ...turn, media: turn.media.map(named) });

// The conversation of an id, or null. The blob of a medium that is no longer kept is null.
export async function open(id) {
  const found = await tried(store.load(id), null);
  if (!found) return null;
  const blobs = new Map(found.media.map(({ id: medium, blob }) => [medium, blob]));
  const media = new Map(); // a medium of several branches is one
  const own = (medium) => media.get(medium.id) ?? media.set(medium.id, { ...medium, blob: blobs.get(medium.id) ?? null }).get(medium.id);
  return new Conversation(found.record, found.turns.map((turn) => ({ ...turn, media: turn.media.map(own) })));
}

export async function save(conversation, turns = []) {
  if (!conversation.isForgotten) await tried(store.save({ ...conversation.record }, turns.map(stripped)));
}

export async function saveMedia(conversation, media) {
  const at = Date.now();
  for (const medium of media) {
    if (medium.blob) await tried(store.saveMedium({ ...named(medium), conversation: conversation.id, at, blob: medium.blob }));
  }
}

// Forget turns that the conversation no longer has, and the media that nothing in it names any more.
export function forget(conversation, turns) {
  const left = conversation.media();
  return tried(store.forget(turns, turns.flatMap((turn) => turn.media).filter((medium) => !left.has(medium.id))));
}

// An answer to it that still comes is not written either.
export function forgetConversation(conversation) {
  conversation.isForgotten = true;
  return tried(store.forgetConversation(conversation.id));
}

// The address of a medium's content within this page.
export function addressOf(medium) {
  if (medium.blob) medium.url ??= URL.createObjectURL(medium.blob);
  return medium.url;
}

export function release(media) {
  for (const medium of media) {
    if (medium.url) URL.revokeObjectURL(medium.url);
    delete medium.url;
  }
}
