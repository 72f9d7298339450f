// Codex, the coding agent: twenty turns of one conversation over Responses, with all its functions and a history that grows.
// It runs as a copy in .clients/codex, beside its packages. The model computes nothing: answers are letters without a sense.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';

const TURNS = 20;
const binary = new URL('node_modules/.bin/codex', import.meta.url).pathname;
const home = `${process.cwd()}/codex`; // the client refuses a home in the directory for temporary files
mkdirSync(`${home}/work`, { recursive: true });
writeFileSync(`${home}/config.toml`, `
model = "null"
model_provider = "mmrt"
model_context_window = ${process.env.MMRT_CONTEXT}
approval_policy = "never"
sandbox_mode = "read-only"
[model_providers.mmrt]
name = "mmrt"
base_url = "${process.env.MMRT_URL}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`);

function turn(...rest) {
  const options = { cwd: `${home}/work`, env: { ...process.env, CODEX_HOME: home }, encoding: 'utf8', input: '', timeout: 60_000 };
  const done = spawnSync(binary, ['exec', ...rest], options);
  const events = done.stdout.split('\n').filter((line) => line.startsWith('{')).map((line) => JSON.parse(line));
  const failed = events.filter((event) => ['error', 'turn.failed'].includes(event.type));
  assert(done.status === 0 && failed.length === 0, `${JSON.stringify(failed)} ${done.stdout} ${done.stderr}`);
  const completed = events.find((event) => event.type === 'turn.completed');
  assert(completed, done.stdout);
  return { usage: completed.usage, thread: events.find((event) => event.type === 'thread.started').thread_id };
}

const flags = ['--skip-git-repo-check', '--json'];
const first = turn(...flags, 'List the files here, then say what they are for.');
let last = first;
for (let number = 2; number <= TURNS; number++) last = turn('resume', first.thread, ...flags, `Turn ${number}: and what is missing?`);
assert(first.usage.input_tokens > 5000, 'its instructions and functions are long');
assert(last.usage.input_tokens > first.usage.input_tokens, 'the history grows');
assert(last.usage.cached_input_tokens > first.usage.input_tokens / 2, 'what was sent before is cached');
console.log(`codex: ${TURNS} turns, ${first.usage.input_tokens} to ${last.usage.input_tokens} prompt tokens, of which ${last.usage.cached_input_tokens} were cached`);
