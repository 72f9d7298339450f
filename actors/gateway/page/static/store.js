// Conversations, their turns and media in IndexedDB. Without one (a private window) all goes on, and is forgotten with the tab.

const MAX_MEDIA_BYTES = 1 << 30; // of all conversations; beyond it the oldest are forgotten

let opening = null;

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("mmrt", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      for (const name of ["turns", "media"]) request.result.createObjectStore(name, { keyPath: "id" }).createIndex("conversation", "conversation");
      request.transaction.objectStore("media").createIndex("age", ["at", "size"]);
    };
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      request.result.onclose = () => (opening = null); // the browser has deleted its data
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab holds an older history"));
  });
  return opening;
}

// Run `act(stores)` in one transaction and return its result once everything is written.
async function within(names, mode, act) {
  const transaction = (await open()).transaction(names, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error ?? new Error("the browser gave up"));
  });
  ended.catch(() => {}); // `act` fails of the same
  const result = await act(...names.map((name) => transaction.objectStore(name)));
  await ended;
  return result;
}

// Records of conversations, the newest first.
export async function list() {
  const records = await within(["conversations"], "readonly", (store) => done(store.getAll()));
  return records.sort((a, b) => b.updated - a.updated);
}

// {record, turns, media}, or null if there is no such conversation. The media are records with a `blob`.
export function load(id) {
  return within(["conversations", "turns", "media"], "readonly", async (conversations, turns, media) => {
    const record = await done(conversations.get(id));
    if (!record) return null;
    return { record, turns: await done(turns.index("conversation").getAll(id)), media: await done(media.index("conversation").getAll(id)) };
  });
}

// Write a conversation's record and some of its turns.
export function save(record, turns = []) {
  return within(["conversations", "turns"], "readwrite", (conversations, store) => {
    conversations.put(record);
    for (const turn of turns) store.put(turn);
  });
}

// Write a medium {id, conversation, name, kind, mime, size, at, blob}, and forget the oldest ones if all are too many.
export function saveMedium(medium) {
  return within(["media"], "readwrite", async (media) => {
    media.put(medium);
    let room = MAX_MEDIA_BYTES;
    for await (const [key, [, size]] of backwards(media.index("age"))) {
      room -= size;
      if (room < 0) media.delete(key);
    }
  });
}

// Yield [primary key, key] of an index from its end.
async function* backwards(index) {
  const request = index.openKeyCursor(null, "prev");
  for (let cursor = await done(request); cursor; cursor = await done(request)) {
    yield [cursor.primaryKey, cursor.key];
    cursor.continue();
  }
}

export function forget(turns, media) {
  return within(["turns", "media"], "readwrite", (turnStore, mediaStore) => {
    for (const { id } of turns) turnStore.delete(id);
    for (const { id } of media) mediaStore.delete(id);
  });
}

export function forgetConversation(id) {
  return within(["conversations", "turns", "media"], "readwrite", async (conversations, ...stores) => {
    conversations.delete(id);
    for (const store of stores) for (const key of await done(store.index("conversation").getAllKeys(id))) store.delete(key);
  });
}
