// openai (Node): chat, streams, pictures, structured output, functions, embeddings, transcriptions, Responses, errors, cancellation.
// It runs as a copy in .clients/node_openai, beside its packages.
import assert from 'node:assert/strict';
import { createReadStream, readFileSync } from 'node:fs';
import OpenAI from 'openai';

const url = process.env.MMRT_URL;
const root = new URL('../../', import.meta.url);
const [model, hello, answer] = ['demo', 'Hello!', 'Hello! Show me a picture, a video or a sound.'];
const picture = `data:image/png;base64,${readFileSync(new URL('examples/shapes.png', root)).toString('base64')}`;
const properties = { colour: { enum: ['red', 'green'] }, corners: { enum: [3, 4, 5] } };
const schema = { type: 'object', properties, required: ['colour', 'corners'], additionalProperties: false };
const isShape = (text) => ['red', 'green'].includes(JSON.parse(text).colour);

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0, timeout: 60_000 });
const asked = { model, messages: [{ role: 'user', content: hello }], temperature: 0 };

const whole = await client.chat.completions.create(asked);
assert.equal(whole.choices[0].message.content, answer);
assert(whole.usage.completion_tokens > 1);
let streamed = '';
let usage;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? '';
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, answer);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
assert.equal(await client.chat.completions.stream(asked).finalContent(), answer);

const content = [{ type: 'image_url', image_url: { url: picture } }, { type: 'text', text: 'What colour is the circle?' }];
const seen = await client.chat.completions.create({ ...asked, messages: [{ role: 'user', content }] });
assert.equal(seen.choices[0].message.content, 'Red.');

const response_format = { type: 'json_schema', json_schema: { name: 'shape', strict: true, schema } };
const parsed = await client.chat.completions.parse({ ...asked, response_format });
assert(isShape(JSON.stringify(parsed.choices[0].message.parsed)));
const tools = [{ type: 'function', function: { name: 'paint', parameters: schema } }];
const tool_choice = { type: 'function', function: { name: 'paint' } };
const called = await client.chat.completions.create({ ...asked, tools, tool_choice });
assert(isShape(called.choices[0].message.tool_calls[0].function.arguments));
const final = await client.chat.completions.stream({ ...asked, tools, tool_choice }).finalChatCompletion();
assert(isShape(final.choices[0].message.tool_calls[0].function.arguments));

const { data } = await client.embeddings.create({ model, input: ['red', 'blue'] }); // as base64, by default of the client
assert.equal(data.length, 2);
assert(Math.abs(data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4);
const file = createReadStream(new URL('examples/beeps.wav', root));
assert((await client.audio.transcriptions.create({ model, file })).text);

const response = await client.responses.create({ model, input: hello, temperature: 0 });
assert.equal(response.output_text, answer);
let events = '';
for await (const event of await client.responses.create({ model, input: hello, temperature: 0, stream: true })) {
  if (event.type === 'response.output_text.delta') events += event.delta;
}
assert.equal(events, answer);

const began = [];
for await (const event of await client.responses.create({ model, input: hello, temperature: 0, background: true, stream: true })) {
  if (began.push(event) === 4) break;
}
const { id } = began[0].response;
const rest = [];
for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: 3 })) rest.push(event);
assert.deepEqual([...began, ...rest].map((event) => event.sequence_number), [...began, ...rest].map((_, at) => at));
assert.equal((await client.responses.retrieve(id)).output_text, answer);
const long = await client.responses.create({ model, input: hello, background: true, max_output_tokens: 4000, ignore_eos: true });
assert.equal((await client.responses.cancel(long.id)).status, 'cancelled');

await assert.rejects(client.chat.completions.create({ ...asked, temperature: 9 }), (error) =>
  error instanceof OpenAI.BadRequestError && error.param === 'temperature');
await assert.rejects(client.chat.completions.create({ ...asked, model: 'gpt-9' }), OpenAI.NotFoundError);

const left = await client.chat.completions.create({ ...asked, max_tokens: 2000, ignore_eos: true, stream: true });
for await (const _ of left) break;
const controller = new AbortController();
setTimeout(() => controller.abort(), 500);
const aborted = client.chat.completions.create({ ...asked, max_tokens: 2000, ignore_eos: true }, { signal: controller.signal });
await assert.rejects(aborted, OpenAI.APIUserAbortError);
