// A request as a shell command and as a Python program. Both read the media from files beside them.

import { mark } from "./encode.js";

const OPENAI_FIELDS = ["model", "messages", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "stop", "response_format", "stream", "stream_options"];

const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

// `body`: as it is sent, with a FilePart for each medium.
export function asCurl(body, origin, hasKey) {
  const { text, files } = mark(body, 1);
  const head = [
    `curl -N ${shell(`${origin}/v1/chat/completions`)}`,
    "-H 'Content-Type: application/json'",
    ...(hasKey ? ['-H "Authorization: Bearer $MMRT_API_KEY"'] : []),
  ].join(" \\\n  ");
  let rest = text;
  if (!files.length) return `${head} \\\n  -d ${shell(rest)}\n`;
  const parts = [];
  for (const { file, mark: place } of files) {
    const { name, mime } = file;
    const [before, after] = rest.split(place);
    parts.push(`printf %s ${shell(`${before}data:${mime};base64,`)}`, `base64 -w 0 ${shell(`./${name}`)}`);
    rest = after;
  }
  parts.push(`printf %s ${shell(rest)}`);
  return `{\n${parts.map((part) => `${part}\n`).join("")}} | ${head} \\\n  --data-binary @-\n`;
}

export function asPython(body, origin, hasKey) {
  const { text: json, files: media } = mark(body);
  const copy = JSON.parse(json);
  const known = Object.entries(copy).filter(([name]) => OPENAI_FIELDS.includes(name));
  const extra = Object.entries(copy).filter(([name]) => !OPENAI_FIELDS.includes(name));
  const lines = [
    ...(media.length ? ["import base64"] : []),
    ...(hasKey ? ["import os"] : []),
    ...(media.length ? ["from pathlib import Path"] : []),
    ...(media.length || hasKey ? [""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=${hasKey ? 'os.environ["MMRT_API_KEY"]' : '"none"'})`,
    "",
  ];
  if (media.length) {
    lines.push("", "def data_url(path, mime):", '    return f"data:{mime};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"', "", "");
  }
  lines.push(`${copy.stream ? "stream" : "answer"} = client.chat.completions.create(`);
  for (const [name, value] of known) lines.push(`    ${name}=${literal(value, 4)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra), 4)},`);
  lines.push(")");
  if (copy.stream) {
    lines.push("for chunk in stream:", "    if chunk.choices:", '        print(chunk.choices[0].delta.content or "", end="", flush=True)', "print()");
  } else {
    lines.push("print(answer.choices[0].message.content)");
  }
  let text = `${lines.join("\n")}\n`;
  for (const { file, mark: place } of media) {
    text = text.replace(`"${place}"`, () => `data_url(${JSON.stringify(file.name)}, ${JSON.stringify(file.mime)})`);
  }
  return text;
}

// A Python literal of a JSON value.
function literal(value, indent) {
  const pad = " ".repeat(indent + 4);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${pad}${literal(one, indent + 4)},\n`).join("")}${" ".repeat(indent)}]` : "[]";
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, indent + 4)}`);
    const line = `{${entries.join(", ")}}`;
    return line.length + indent < 100 && !line.includes("\n") ? line : `{\n${entries.map((entry) => `${pad}${entry},\n`).join("")}${" ".repeat(indent)}}`;
  }
  return JSON.stringify(value);
}
