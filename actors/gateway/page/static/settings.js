// The settings of answers: the form below the prompt, kept across reloads.

import { $, say, toggle } from "./dom.js";
import { formFields, watchForm } from "./forms.js";
import { keep, kept } from "./kept.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "guidance_scale",
];

export class Settings {
  constructor() {
    this.elements = $("composer").elements;
    this.fields = [...$("settings").querySelectorAll("[name]")];
    watchForm(this.elements);
    this.restore(kept("settings") ?? {});
    for (const event of ["input", "change"]) $("settings").addEventListener(event, () => this.changed());
    $("settings-open").addEventListener("click", () => this.show($("settings").hidden));
    $("settings-reset").addEventListener("click", () => {
      this.restore({});
      this.changed();
    });
  }

  show(doIt) {
    $("settings").hidden = !doIt;
    toggle($("settings-open"), "aria-expanded", doIt);
  }

  // Return whether every field is in its range; else show the one that is not.
  check() {
    if (!$("composer").checkValidity()) this.show(true); // the browser complains about what it can show
    return $("composer").reportValidity();
  }

  get system() {
    return this.elements.system.value;
  }

  // The fields of a request that the settings give; what is left empty is the server's default.
  options() {
    const { elements } = this;
    const options = {};
    for (const name of NUMBERS) if (elements[name].value !== "") options[name] = Number(elements[name].value);
    if (elements.negative_prompt.value) options.negative_prompt = elements.negative_prompt.value;
    const stop = elements.stop.value.split("\n").filter(Boolean);
    if (stop.length) options.stop = stop;
    if (elements.ignore_eos.checked) options.ignore_eos = true;
    Object.assign(options, formFields(elements));
    options.stream = elements.stream.checked;
    if (options.stream) options.stream_options = { include_usage: true };
    return options;
  }

  restore(values) {
    for (const field of this.fields) {
      if (field.type === "checkbox") field.checked = values[field.name] ?? field.defaultChecked;
      else field.value = values[field.name] ?? "";
    }
    this.elements.form.dispatchEvent(new Event("change"));
    this.count();
  }

  changed() {
    keep("settings", Object.fromEntries(this.altered().map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value])));
    this.count();
  }

  altered() {
    return this.fields.filter((field) => (field.type === "checkbox" ? field.checked !== field.defaultChecked : field.value !== ""));
  }

  // How many differ from the defaults: they also count while the form is closed.
  count() {
    const count = this.altered().length;
    say($("settings-open"), count ? `Settings (${count})` : "Settings");
  }
}
