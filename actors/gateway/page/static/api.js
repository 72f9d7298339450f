// Requests to this page's own server. The key lives in the tab's session storage; there are no cookies.

import { encode } from "./encode.js";
import { upload } from "./upload.js";

const KEY = "mmrt-api-key";
const UNREACHABLE = "The server cannot be reached, or it closed the connection. Check that it runs (mmrt status), then try again.";
const TOKEN = "mmrt-page-token";
let onUnauthorized = () => {};
let ofModel = ""; // of several that the server has: the one whose run the page shows

export class ApiError extends Error {
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// `mmrt up` prints an address with the run's token where nothing else tells who we are. It stays in this tab.
const given = /^#token=([\w-]+)$/.exec(location.hash);
if (given) {
  sessionStorage.setItem(TOKEN, given[1]);
  history.replaceState(null, "", location.pathname);
}

export const setModel = (name) => (ofModel = name);
export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const whenUnauthorized = (ask) => (onUnauthorized = ask);

// Browsers call every failure of the network a TypeError, with words of their own ("Failed to fetch").
const reached = (promise) =>
  promise.catch((error) => {
    throw error instanceof TypeError ? new ApiError(UNREACHABLE, 0) : error;
  });

async function send(path, options = {}) {
  const key = getKey();
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (path.startsWith("/page/") && sessionStorage.getItem(TOKEN)) headers["X-Mmrt-Token"] = sessionStorage.getItem(TOKEN);
  if (options.body) headers["Content-Type"] = "application/json";
  const whole = { ...options, headers, credentials: "omit", cache: "no-store" };
  if (ofModel && path.startsWith("/page/")) path += `${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(ofModel)}`;
  const response = await reached(options.tell ? upload(path, whole) : fetch(path, whole));
  if (response.ok) return response;
  const text = await reached(response.text());
  let message = text.slice(0, 500) || response.statusText;
  let code = "";
  try {
    ({ message, code } = JSON.parse(text).error);
  } catch {
    // not the server's own error: its text must do
  }
  if (response.status === 401 && key === getKey()) onUnauthorized(); // else another one is in use by now
  throw new ApiError(message, response.status, code);
}

export const getJson = async (path, options) => (await send(path, options)).json();
export const getBlob = async (path) => (await send(path)).blob();
export const command = async (verb, actor) =>
  (await send(`/page/${verb}/${encodeURIComponent(actor)}`, { method: "POST", body: "{}" })).json();

// Yield the chunks of an answer. Streamed or not, they look alike: {choices: [{delta, finish_reason}], usage}. A body can hold FileParts;
// `tell(what, share)` learns how far they are. `name`: of a stream that goes on without this page; "": it ends with it.
export async function* complete(body, { signal, hasFiles, tell, name }) {
  const sent = hasFiles
    ? { body: await encode(body, { signal, tell: (share) => tell("reading", share) }), tell: (share) => tell("sending", share) }
    : { body: JSON.stringify(body) };
  const headers = name ? { "X-Conversation-Id": name } : {};
  const response = await send("/v1/chat/completions", { method: "POST", signal, headers, ...sent });
  if (!body.stream) {
    const whole = await reached(response.json());
    const [choice] = whole.choices;
    yield { id: whole.id, choices: [{ delta: choice.message, finish_reason: choice.finish_reason }], usage: whole.usage };
    return;
  }
  yield* chunks(response);
}

// Return the chunks of a stream that went on without this page, from the first one on.
export const follow = async (name, { signal }) => chunks(await send(`/v1/stream/${name}`, { signal }));

// End a stream that would go on without this page.
export const drop = (name) => send(`/v1/stream/${name}`, { method: "DELETE" }).catch(() => {});

async function* chunks(response) {
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, ...statusAndCode(chunk.error.code));
    yield chunk;
  }
  throw new ApiError("The connection ended in the middle of the answer. Try again.", 0);
}

// The code of an error in a stream is the status that it would have had, or, where there is one, a word.
const statusAndCode = (code) => (typeof code === "number" ? [code] : [0, code ?? ""]);

// Yield the data of server-sent events; comments keep the connection alive and say nothing.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(reader.read());
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data: ")); // a comment may be in front of it
      if (data) yield data.slice(6);
    }
  }
}
