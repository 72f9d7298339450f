// The dialog that shows a request as code.

import { getKey } from "./api.js";
import { copy } from "./clipboard.js";
import { $, dialogButtons, say, toggle } from "./dom.js";
import { asCurl, asPython } from "./snippets.js";

export class CodeDialog {
  // `bodyOf({text, media})`: the body of the request that the prompt would send.
  constructor(bodyOf, attachments) {
    const dialog = $("code-dialog");
    const languages = [...dialog.querySelectorAll("[data-language]")];
    let codes = {};
    const show = (language) => {
      say($("code"), codes[language]);
      for (const button of languages) toggle(button, "aria-pressed", button.dataset.language === language);
    };
    dialogButtons(dialog);
    for (const button of languages) button.addEventListener("click", () => show(button.dataset.language));
    $("code-open").addEventListener("click", () => {
      const body = bodyOf({ text: $("prompt").value.trim(), media: attachments.media });
      codes = { curl: asCurl(body, location.origin, getKey()), python: asPython(body, location.origin, getKey()) };
      const names = body.messages.flatMap(({ content }) => (Array.isArray(content) ? content : [])).map((part) => part[part.type].url?.name);
      const files = [...new Set(names.filter(Boolean))];
      say($("code-note"), files.length ? `It reads ${files.join(", ")} from the current directory.` : "");
      show("curl");
      say($("code-copy"), "Copy");
      dialog.showModal();
    });
    $("code-copy").addEventListener("click", () => this.copy());
  }

  async copy() {
    try {
      await copy($("code").textContent);
      say($("code-copy"), "Copied");
    } catch {
      getSelection().selectAllChildren($("code"));
      say($("code-copy"), "Press Ctrl-C");
    }
  }
}
