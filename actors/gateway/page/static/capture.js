// Pictures, clips and sounds that camera and microphone record.

import { $, dialogButtons, make, say, toggle } from "./dom.js";

const MAX_CLIP_MS = 60_000;

// Pictures and clips of the camera, given to `add(files)`.
export function watchCamera(add) {
  const dialog = $("camera-dialog");
  const video = $("viewfinder");
  let stream = null;
  let recorder = null;
  let isWanted = false; // the clip; not if the dialog is closed by another button
  const complain = (text) => {
    $("camera-error").hidden = false;
    say($("camera-error"), text);
  };
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
      complain(`No camera: ${error.message}`);
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
    add([await toFile(canvas, `camera-${stamp()}.jpg`, "image/jpeg")]);
    dialog.close();
  });
  $("film").addEventListener("click", () => {
    if (recorder) return recorder.stop();
    if (!stream) return;
    try {
      recorder = record(stream, "video/webm", `clip-${stamp()}.webm`, (file) => {
        recorder = null;
        toggle($("film"), "aria-pressed", false);
        say($("film"), "Record clip");
        if (isWanted) add([file]);
        dialog.close();
      });
    } catch (error) {
      return complain(`No clip: ${error.message}`);
    }
    isWanted = true;
    toggle($("film"), "aria-pressed", true);
    say($("film"), "Stop and use");
  });
}

// Sounds of the microphone, given to `add(files)`; `complain(text)` tells why there is none.
export function watchMicrophone(add, complain) {
  let recorder = null;
  const button = $("microphone");
  button.addEventListener("click", async () => {
    if (recorder) return recorder.stop();
    button.disabled = true; // while the browser asks
    let stream = null;
    try {
      stream = await openDevice({ audio: true });
      recorder = record(stream, "audio/webm", `sound-${stamp()}.webm`, (file) => {
        recorder = null;
        stop(stream);
        toggle(button, "aria-pressed", false);
        button.setAttribute("aria-label", "Record a sound");
        add([file]);
      });
      toggle(button, "aria-pressed", true);
      button.setAttribute("aria-label", "Stop recording");
    } catch (error) {
      stop(stream);
      complain(`No microphone: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  });
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
