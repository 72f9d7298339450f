// The list of conversations: open, rename, delete, export and import.

import * as archive from "./archive.js";
import { $, icon, isWide, make, toggle } from "./dom.js";
import { keep, kept } from "./kept.js";
import { exported, imported } from "./transfer.js";

const SURE_MS = 4000;
const CURRENT = "mmrt-conversation"; // of this tab
const ROOMY = "(min-width: 1500px)"; // the list stands beside the rest unasked

export class History {
  // `playground`: shows a conversation, and tells by `changed` that the list may look different.
  constructor(playground) {
    this.playground = playground;
    this.shown = ""; // what the list was made of
    this.hasBegun = false;
    this.show(isWide() && (kept("history") ?? matchMedia(ROOMY).matches));
    $("history-open").addEventListener("click", () => {
      this.show($("history").hidden);
      if (isWide()) keep("history", !$("history").hidden);
    });
    $("history-close").addEventListener("click", () => {
      this.show(false);
      if (isWide()) keep("history", false);
      $("history-open").focus();
    });
    $("history").addEventListener("keydown", (event) => event.key === "Escape" && !isWide() && this.show(false));
    $("export").addEventListener("click", async () => this.export((await archive.list()).map(({ id }) => id), "mmrt-conversations"));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.import());
    addEventListener("focus", () => this.draw()); // another tab may have written
  }

  show(doIt) {
    $("history").hidden = !doIt;
    toggle($("history-open"), "aria-expanded", doIt);
    this.draw();
  }

  // Open what this tab showed before a reload; a new tab opens the latest.
  async begin() {
    const id = sessionStorage.getItem(CURRENT) ?? (await archive.list())[0]?.id;
    const found = id ? await archive.open(id) : null;
    this.hasBegun = true;
    if (found && !this.playground.conversation.turns.size) {
      this.playground.show(found);
      this.playground.resume();
    } else this.draw();
  }

  async draw() {
    const { conversation } = this.playground;
    if (this.hasBegun) sessionStorage.setItem(CURRENT, conversation.id);
    if ($("history").hidden || $("conversations").querySelector("input")) return;
    const records = await archive.list();
    if (conversation.turns.size && !records.some(({ id }) => id === conversation.id)) records.unshift(conversation.record);
    const shown = JSON.stringify(records.map(({ id, title }) => [id, title, id === conversation.id]));
    if (shown === this.shown) return;
    this.shown = shown;
    $("conversations").replaceChildren(...records.map((record) => this.entry(record)));
    $("no-conversations").hidden = records.length > 0;
  }

  entry(record) {
    const isCurrent = record.id === this.playground.conversation.id;
    const title = make(
      "button",
      { type: "button", class: "quiet title", title: record.title, "aria-current": isCurrent && "true", onclick: () => this.open(record.id) },
      record.title || "Untitled",
    );
    const act = (name, label, onclick) =>
      make("button", { type: "button", class: "quiet tool", "aria-label": `${label} “${record.title}”`, title: label, onclick }, icon(name));
    const remove = act("remove", "Delete", () => {
      if (remove.dataset.sure !== undefined) return this.remove(record.id);
      remove.dataset.sure = "";
      remove.replaceChildren("Delete?");
      setTimeout(() => {
        delete remove.dataset.sure;
        remove.replaceChildren(icon("remove"));
      }, SURE_MS);
    });
    const buttons = [act("edit", "Rename", () => this.rename(record, title)), act("export", "Export", () => this.export([record.id], record.title)), remove];
    return make("li", {}, title, make("span", { class: "tools" }, ...buttons));
  }

  async open(id) {
    if (!isWide()) this.show(false);
    if (id === this.playground.conversation.id) return;
    const found = await archive.open(id);
    if (found) this.playground.show(found);
    else this.draw();
  }

  rename(record, title) {
    const box = make("input", { type: "text", maxlength: 200, "aria-label": "Title" });
    box.value = record.title;
    let isOver = false;
    const end = async (isWanted) => {
      if (isOver) return;
      isOver = true;
      const name = box.value.trim();
      box.remove();
      this.shown = "";
      if (isWanted && name) {
        const { conversation } = this.playground;
        const own = conversation.id === record.id ? conversation : await archive.open(record.id);
        if (own) {
          own.record.title = name;
          await archive.save(own);
        }
      }
      this.draw();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
      event.stopPropagation();
    });
    box.addEventListener("blur", () => end(true));
    title.replaceWith(box);
    box.select();
  }

  async remove(id) {
    if (id === this.playground.conversation.id) return this.playground.forget();
    await archive.forgetConversation({ id });
    this.draw();
  }

  async export(ids, name) {
    const conversations = [];
    for (const id of ids) {
      const found = await archive.open(id);
      if (found) conversations.push(found);
    }
    let file;
    try {
      file = await exported(conversations);
    } catch (error) {
      return this.playground.complain(error.message);
    }
    const url = URL.createObjectURL(file);
    make("a", { href: url, download: `${name.replace(/[^\p{L}\p{N} ._-]/gu, "").slice(0, 60) || "conversation"}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }

  async import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    if (!file) return;
    try {
      const conversations = await imported(file);
      for (const conversation of conversations) {
        await archive.save(conversation, [...conversation.turns.values()]);
        await archive.saveMedia(conversation, [...conversation.media().values()]);
      }
      if (conversations.length) this.playground.show(conversations[0]);
    } catch (error) {
      this.playground.complain(error.message);
    }
    this.draw();
  }
}
