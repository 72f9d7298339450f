// Copy text, also where the browser has no clipboard for pages (it wants https or localhost).

import { icon, make, toggle } from "./dom.js";

const SHOWN_MS = 1500;

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = make("textarea", { class: "hidden", readonly: true });
  box.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(box);
  box.select();
  const isDone = document.execCommand("copy");
  box.remove();
  if (!isDone) throw new Error("the browser refused");
}

// A button that copies what `text()` returns, and says so.
export function copyButton(label, text) {
  const button = make("button", { type: "button", class: "quiet tool copy", "aria-label": label, title: label }, icon("copy"));
  const show = (state, said) => {
    toggle(button, "aria-label", said);
    toggle(button, "title", said);
    button.replaceChildren(icon(state));
  };
  button.addEventListener("click", async () => {
    try {
      await copy(text());
      show("done", "Copied");
    } catch (error) {
      show("failed", `Not copied: ${error.message}`);
    }
    setTimeout(() => show("copy", label), SHOWN_MS);
  });
  return button;
}
