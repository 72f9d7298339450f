// JSON with files in it as base64, in pieces: the browser reads and encodes beside the page, and holds what is made outside its memory.

const PIECE = 3 << 20; // bytes; a multiple of 3, so that pieces of base64 add up

function base64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error("the file cannot be read (any more): attach it again"));
    reader.readAsDataURL(blob);
  });
}

// A file in a value that becomes JSON.
export class FilePart {
  constructor({ name, kind, mime, blob }) {
    Object.assign(this, { name, kind, mime, blob });
  }
}

// The JSON of a value with a mark, which occurs nowhere else, in place of each FilePart: {text, files: [{file, mark}]}.
export function mark(value, indent) {
  const salt = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const files = [];
  const replace = (_, part) => {
    if (!(part instanceof FilePart)) return part;
    files.push({ file: part, mark: `@${salt}-${files.length}@` });
    return files.at(-1).mark;
  };
  return { text: JSON.stringify(value, replace, indent), files };
}

// Make a Blob of the JSON of a value, with each FilePart as a data: URL. `tell(share)` learns how much of the files is encoded.
export async function encode(value, { tell = () => {}, signal } = {}) {
  const { text, files } = mark(value);
  const total = files.reduce((sum, { file }) => sum + file.blob.size, 0);
  const parts = [];
  let rest = text;
  let done = 0;
  for (const { file, mark: place } of files) {
    const at = rest.indexOf(place);
    parts.push(rest.slice(0, at), `data:${file.mime};base64,`);
    rest = rest.slice(at + place.length);
    for (let from = 0; from < file.blob.size; from += PIECE) {
      signal?.throwIfAborted();
      parts.push(new Blob([await base64(file.blob.slice(from, from + PIECE))]));
      done += Math.min(PIECE, file.blob.size - from);
      tell(done / total);
    }
  }
  return new Blob([...parts, rest], { type: "application/json" });
}

// How many bytes a file takes in a request.
export const encodedSize = (size) => 4 * Math.ceil(size / 3) + 64;
