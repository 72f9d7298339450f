// Small helpers around the DOM. Text goes in as text nodes alone: nothing on this page is ever parsed as HTML.

export const $ = (id) => document.getElementById(id);

// Make an element. Attributes: `class`, `data-…`, `aria-…`, and on… handlers. Children: elements or text.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Set the text of an element if it differs, so that an unchanged page is not laid out anew.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function toggle(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Call `draw` now and whenever light and dark change.
export function onScheme(draw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

export const isWide = () => matchMedia("(min-width: 1020px)").matches;

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

export function duration(ms) {
  if (ms < 9.95) return `${number(ms, 1)} ms`;
  return ms < 999.5 ? `${number(ms)} ms` : `${number(ms / 1000, ms < 99_950 ? 2 : 0)} s`;
}

// Close a dialog by its buttons. (Escape and focus are the browser's.)
export function dialogButtons(dialog) {
  for (const button of dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => dialog.close());
}
