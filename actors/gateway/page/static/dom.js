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

// Call `draw` whenever light and dark change (theme.js).
export function onScheme(draw) {
  addEventListener("scheme", draw);
}

const ICONS = {
  copy: "M7 7h9v9H7zM4 13V4h9",
  done: "M4 10.5l4 4 8-9",
  failed: "M5 5l10 10M15 5L5 15",
  edit: "M4 16l1-4 8-8 3 3-8 8z",
  again: "M15.5 7A6 6 0 1 0 16 11M16 3v4h-4",
  remove: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6",
  back: "M12 5l-5 5 5 5",
  forth: "M8 5l5 5-5 5",
  export: "M10 3v9M6.5 8.5L10 12l3.5-3.5M4 16h12",
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
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
