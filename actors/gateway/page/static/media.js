// Attachments of a message: files that are chosen, dropped or pasted, and what camera and microphone record.

import { $, dialogButtons, make, say, toggle } from "./dom.js";

const TYPES = {
  jpg: "image/jpeg", jpeg: "image/jpeg", png: "image/png", webp: "image/webp", gif: "image/gif", bmp: "image/bmp", avif: "image/avif",
  mp4: "video/mp4", m4v: "video/mp4", mov: "video/quicktime", webm: "video/webm", mkv: "video/x-matroska", avi: "video/x-msvideo",
  mp3: "audio/mpeg", wav: "audio/wav", flac: "audio/flac", ogg: "audio/ogg", opus: "audio/ogg", m4a: "audio/mp4", aac: "audio/aac",
};
const MAX_CLIP_MS = 60_000;

// {name, kind: image | video | audio, mime, blob, url} of a file; null if it is none of these.
function describe(file) {
  const mime = file.type.split(";")[0] || TYPES[file.name.split(".").pop().toLowerCase()] || "";
  const kind = mime.split("/")[0];
  if (!["image", "video", "audio"].includes(kind)) return null;
  return { name: file.name, kind, mime, blob: file, url: URL.createObjectURL(file) };
}

// The medium as a data: URL.
export async function dataUrl(medium) {
  const bytes = new Uint8Array(await medium.blob.arrayBuffer());
  let binary = "";
  for (let at = 0; at < bytes.length; at += 0x8000) binary += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return `data:${medium.mime};base64,${btoa(binary)}`;
}

// A preview of the medium, which is also a link to its file.
export function preview(medium, remove) {
  const show = {
    image: () => make("img", { src: medium.url, alt: medium.name }),
    video: () => make("video", { src: medium.url, muted: true, playsinline: true, preload: "metadata", "aria-label": medium.name }),
    audio: () => make("span", { class: "sound", "aria-hidden": "true" }, "♪"),
  }[medium.kind]();
  const link = make("a", { href: medium.url, download: medium.name, title: `Save ${medium.name}` }, show, make("span", {}, medium.name));
  const button = remove && make("button", { type: "button", class: "icon", "aria-label": `Remove ${medium.name}`, onclick: remove }, "×");
  return make("li", { class: "medium", "data-kind": medium.kind }, link, ...(button ? [button] : []));
}

export class Attachments {
  constructor(complain) {
    this.media = [];
    this.complain = complain;
    this.watchFiles();
    this.watchCamera();
    this.watchMicrophone();
  }

  add(files) {
    const media = [...files].map((file) => describe(file) ?? file);
    const strangers = media.filter((medium) => medium instanceof File);
    if (strangers.length) this.complain(`${strangers.map((file) => file.name).join(", ")}: neither a picture, a video nor a sound`);
    this.media.push(...media.filter((medium) => !(medium instanceof File)));
    this.draw();
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
      URL.revokeObjectURL(medium.url);
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
    $("prompt").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
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

  watchCamera() {
    const dialog = $("camera-dialog");
    const video = $("viewfinder");
    let stream = null;
    let recorder = null;
    let isWanted = false; // the clip; not if the dialog is closed by another button
    dialogButtons(dialog);
    $("camera").addEventListener("click", async () => {
      $("camera-error").hidden = true;
      dialog.showModal();
      try {
        const opened = await openDevice({ video: { width: { ideal: 1280 } }, audio: false });
        if (!dialog.open) return stop(opened); // closed while the browser asked
        stream = video.srcObject = opened;
        await video.play();
      } catch (error) {
        $("camera-error").hidden = false;
        say($("camera-error"), `No camera: ${error.message}`);
      }
    });
    dialog.addEventListener("close", () => {
      isWanted = false;
      recorder?.stop();
      stop(stream);
      stream = video.srcObject = null;
    });
    $("shoot").addEventListener("click", async () => {
      if (!stream) return;
      const canvas = make("canvas", { width: video.videoWidth, height: video.videoHeight });
      canvas.getContext("2d").drawImage(video, 0, 0);
      this.add([await toFile(canvas, `camera-${stamp()}.jpg`, "image/jpeg")]);
      dialog.close();
    });
    $("film").addEventListener("click", () => {
      if (recorder) return recorder.stop();
      if (!stream) return;
      recorder = record(stream, "video/webm", `clip-${stamp()}.webm`, (file) => {
        recorder = null;
        toggle($("film"), "aria-pressed", false);
        say($("film"), "Record clip");
        if (isWanted) this.add([file]);
        dialog.close();
      });
      isWanted = true;
      toggle($("film"), "aria-pressed", true);
      say($("film"), "Stop and use");
    });
  }

  watchMicrophone() {
    let recorder = null;
    const button = $("microphone");
    button.addEventListener("click", async () => {
      if (recorder) return recorder.stop();
      button.disabled = true; // while the browser asks
      try {
        const stream = await openDevice({ audio: true });
        recorder = record(stream, "audio/webm", `sound-${stamp()}.webm`, (file) => {
          recorder = null;
          stop(stream);
          toggle(button, "aria-pressed", false);
          button.setAttribute("aria-label", "Record a sound");
          this.add([file]);
        });
        toggle(button, "aria-pressed", true);
        button.setAttribute("aria-label", "Stop recording");
      } catch (error) {
        this.complain(`No microphone: ${error.message}`);
      } finally {
        button.disabled = false;
      }
    });
  }
}

function openDevice(wanted) {
  if (!navigator.mediaDevices) throw new Error("browsers allow it to https and localhost only");
  return navigator.mediaDevices.getUserMedia(wanted);
}

const stop = (stream) => stream?.getTracks().forEach((track) => track.stop());
const stamp = () => new Date().toTimeString().slice(0, 8).replaceAll(":", "");

export function toFile(canvas, name, type) {
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(new File([blob], name, { type })), type, 0.92));
}

function record(stream, type, name, use) {
  const parts = [];
  const recorder = new MediaRecorder(stream, { mimeType: type });
  recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
  recorder.addEventListener("stop", () => use(new File(parts, name, { type })));
  recorder.start();
  setTimeout(() => recorder.state === "recording" && recorder.stop(), MAX_CLIP_MS);
  return recorder;
}
