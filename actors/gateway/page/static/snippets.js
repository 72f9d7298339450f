// A request as a shell command and as a Python program. Both read the media from files beside them.

const OPENAI_FIELDS = ["model", "messages", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "stop", "response_format", "stream", "stream_options"];

// Replace each medium's URL in a body by a mark that occurs nowhere else; return [body, marks].
function marked(body) {
  const salt = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const media = [];
  const copy = JSON.parse(
    JSON.stringify(body, (_, value) => {
      if (!value?.medium) return value;
      media.push({ ...value.medium, mark: `@${salt}-${media.length}@` });
      return { url: media.at(-1).mark };
    }),
  );
  return [copy, media];
}

const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

// `body`: as it is sent, but for media, which are {medium: {name, mime}} in place of {url}.
export function asCurl(body, origin, hasKey) {
  const [copy, media] = marked(body);
  const head = [
    `curl -N ${shell(`${origin}/v1/chat/completions`)}`,
    "-H 'Content-Type: application/json'",
    ...(hasKey ? ['-H "Authorization: Bearer $MMRT_API_KEY"'] : []),
  ].join(" \\\n  ");
  let rest = JSON.stringify(copy, null, 1);
  if (!media.length) return `${head} \\\n  -d ${shell(rest)}\n`;
  const parts = [];
  for (const { name, mime, mark } of media) {
    const [before, after] = rest.split(mark);
    parts.push(`printf %s ${shell(`${before}data:${mime};base64,`)}`, `base64 -w 0 ${shell(`./${name}`)}`);
    rest = after;
  }
  parts.push(`printf %s ${shell(rest)}`);
  return `{\n${parts.map((part) => `${part}\n`).join("")}} | ${head} \\\n  --data-binary @-\n`;
}

export function asPython(body, origin, hasKey) {
  const [copy, media] = marked(body);
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
  for (const { name, mime, mark } of media) text = text.replace(`"${mark}"`, () => `data_url(${JSON.stringify(name)}, ${JSON.stringify(mime)})`);
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
