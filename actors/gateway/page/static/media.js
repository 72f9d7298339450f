// Attachments of a message: files that are chosen, dropped or pasted, and what camera and microphone record.

import { addressOf, release } from "./archive.js";
import { watchCamera, watchMicrophone } from "./capture.js";
import { isMedium, newId } from "./conversation.js";
import { $, make } from "./dom.js";
import { encodedSize } from "./encode.js";
import { megabytes } from "./explain.js";

const TYPES = {
  jpg: "image/jpeg", jpeg: "image/jpeg", png: "image/png", webp: "image/webp", gif: "image/gif", bmp: "image/bmp", avif: "image/avif",
  mp4: "video/mp4", m4v: "video/mp4", mov: "video/quicktime", webm: "video/webm", mkv: "video/x-matroska", avi: "video/x-msvideo",
  mp3: "audio/mpeg", wav: "audio/wav", flac: "audio/flac", ogg: "audio/ogg", opus: "audio/ogg", m4a: "audio/mp4", aac: "audio/aac",
};

// A medium of a file; null if it is none.
function describe(file) {
  const mime = file.type.split(";")[0] || TYPES[file.name.split(".").pop().toLowerCase()] || "";
  if (!isMedium(mime)) return null;
  return { id: newId(), name: file.name, kind: mime.split("/")[0], mime, size: file.size, blob: file };
}

// Why a file cannot be sent, or "". `maxBytes`: of a request; `kinds`: of media that the model takes.
function problem(file, { max_body_bytes: maxBytes, kinds }) {
  const medium = describe(file);
  if (!medium) return `${file.name}: neither a picture, a video nor a sound`;
  if (!kinds.includes(medium.kind)) return `${file.name}: this model takes ${kinds.length ? ["text", ...kinds].join(", ") : "text alone"}`;
  if (!file.size) return `${file.name} is empty`;
  if (encodedSize(file.size) <= maxBytes) return "";
  return `${file.name} has ${megabytes(file.size)}; this server takes at most ${megabytes((maxBytes * 3) / 4)}. Send a smaller one, or raise server.max_body_mib.`;
}

// A preview of the medium, which is also a link to its file.
export function preview(medium, remove) {
  const url = addressOf(medium);
  const label = make("span", {}, medium.name);
  if (!url) return make("li", { class: "medium", "data-kind": "gone", title: "This browser no longer keeps it." }, make("span", { class: "sound" }, "?"), label);
  const show = {
    image: () => make("img", { src: url, alt: medium.name, decoding: "async", loading: "lazy" }),
    video: () => make("video", { src: url, muted: true, playsinline: true, preload: "metadata", "aria-label": medium.name }),
    audio: () => make("span", { class: "sound", "aria-hidden": "true" }, "♪"),
  }[medium.kind]();
  const link = make("a", { href: url, download: medium.name, title: `Save ${medium.name}` }, show, label);
  const button = remove && make("button", { type: "button", class: "icon", "aria-label": `Remove ${medium.name}`, onclick: remove }, "×");
  return make("li", { class: "medium", "data-kind": medium.kind }, link, ...(button ? [button] : []));
}

export class Attachments {
  // `limits()`: what the server takes, as {max_body_bytes, kinds}.
  constructor(complain, limits) {
    this.media = [];
    this.complain = complain;
    this.limits = limits;
    this.watchFiles();
    watchCamera((files) => this.add(files));
    watchMicrophone((files) => this.add(files), complain);
  }

  add(files) {
    const problems = [...files].map((file) => problem(file, this.limits()));
    if (problems.some(Boolean)) this.complain(problems.filter(Boolean).join("\n"));
    this.media.push(...[...files].filter((_, at) => !problems[at]).map(describe));
    this.draw();
    $("prompt").focus({ preventScroll: true });
  }

  // Show what attaches media of the kinds that the model takes, and hide the rest.
  offer() {
    const { kinds } = this.limits();
    $("attach").hidden = !kinds.length;
    $("camera").hidden = !kinds.includes("image");
    $("microphone").hidden = !kinds.includes("audio");
    $("files").accept = kinds.map((kind) => `${kind}/*`).join(",");
    for (const one of document.querySelectorAll("[data-needs]")) one.hidden = !kinds.includes(one.dataset.needs);
  }

  take() {
    const media = this.media;
    this.media = [];
    this.draw();
    return media;
  }

  draw() {
    const remove = (medium) => () => {
      this.media = this.media.filter((one) => one !== medium);
      release([medium]);
      this.draw();
      $("prompt").focus();
    };
    $("attachments").replaceChildren(...this.media.map((medium) => preview(medium, remove(medium))));
  }

  watchFiles() {
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", () => {
      this.add($("files").files);
      $("files").value = "";
    });
    addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    let depth = 0; // dragenter and dragleave come for every element on the way
    const isFiles = (event) => event.dataTransfer?.types.includes("Files");
    const show = (change) => ($("drop").hidden = (depth = change === 0 ? 0 : depth + change) <= 0);
    addEventListener("dragenter", (event) => isFiles(event) && show(1));
    addEventListener("dragleave", (event) => isFiles(event) && show(-1));
    addEventListener("dragover", (event) => isFiles(event) && event.preventDefault());
    addEventListener("drop", (event) => {
      if (!isFiles(event)) return;
      event.preventDefault();
      show(0);
      this.add(event.dataTransfer.files);
    });
  }
}
