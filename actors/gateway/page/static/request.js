// The body of a request for some turns. Pure.

import { encodedSize, FilePart } from "./encode.js";
import { megabytes } from "./explain.js";

// `options`: further fields. Media become FileParts.
export function bodyOf(turns, { model, system, options }) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, text, media } of turns) {
    const parts = media.map((medium) => ({ type: `${medium.kind}_url`, [`${medium.kind}_url`]: { url: new FilePart(medium) } }));
    messages.push({ role, content: parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text });
  }
  return { ...(model && { model }), messages, ...options };
}

// Why these turns cannot be sent, or "".
export function problemOf(turns, maxBytes) {
  const media = turns.flatMap((turn) => turn.media);
  const gone = media.find((medium) => !medium.blob);
  if (gone) return `${gone.name} is no longer kept by this browser. Begin a new chat, and attach it again.`;
  const size = media.reduce((sum, medium) => sum + encodedSize(medium.size), 0);
  if (size <= maxBytes) return "";
  const bytes = media.reduce((sum, medium) => sum + medium.size, 0);
  return `The pictures, videos and sounds of this conversation have ${megabytes(bytes)} together; this server takes at most ${megabytes((maxBytes * 3) / 4)} at once. Begin a new chat, or delete a turn with a large one.`;
}
