// Errors in sentences for the person before the page.

import { FilePart } from "./encode.js";

const KINDS = { image: "picture", video: "video", audio: "sound" };

export const kindName = (kind) => KINDS[kind] ?? "file";

export const megabytes = (bytes) => `${(bytes / 1e6).toLocaleString("en", { maximumFractionDigits: bytes < 9.95e6 ? 1 : 0 })} MB`;

// What happened, and what to do. `messages`: those of the request, with a FilePart for each medium.
export function explain(error, messages = []) {
  if (error.status === 401) return "The server wants an API key, and did not accept the one given. Enter the right one under “API key”, then try again.";
  if (error.status === 413) return `The pictures, videos and sounds of this conversation are too large for one request. Send smaller ones, or begin a new chat. (${error.message})`;
  if (error.code === "context_length_exceeded") return `This conversation is too long for the model. Begin a new chat, or delete turns. (${error.message})`;
  return withNames(error.message, messages);
}

// Names of files for places in the request: "messages[0].content[0].image_url.url" is “this picture (cat.png)”.
function withNames(message, messages) {
  return message.replace(/messages\[(\d+)\](?:\.content(?:\[(\d+)\](?:\.\w+)*)?)?/g, (whole, at, part) => {
    const content = messages[Number(at)]?.content;
    const medium = part === undefined ? null : fileOf(content?.[Number(part)]);
    if (medium) return `this ${kindName(medium.kind)} (${medium.name})`;
    const role = messages[Number(at)]?.role;
    return role === "system" ? "the system prompt" : role === "assistant" ? "an earlier answer" : role === "user" ? "this message" : whole;
  });
}

const fileOf = (part) => Object.values(part ?? {}).find((value) => value?.url instanceof FilePart)?.url;
