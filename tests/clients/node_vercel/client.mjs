// Vercel's AI SDK by three of its providers: text, streams, pictures, objects, tools, embeddings, errors, cancellation.
// It runs as a copy in .clients/node_vercel, beside its packages.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, embedMany, generateObject, generateText, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const baseURL = `${process.env.MMRT_URL}/v1`;
const [hello, answer] = ['Hello!', 'Hello! Show me a picture, a video or a sound.'];
const picture = readFileSync(new URL('../../examples/shapes.png', import.meta.url));
const schema = z.object({ colour: z.enum(['red', 'green']), corners: z.enum(['3', '4']) }).strict();
const compatible = createOpenAICompatible({ name: 'mmrt', baseURL, apiKey: 'none', supportsStructuredOutputs: true, includeUsage: true });
const openai = createOpenAI({ baseURL, apiKey: 'none' });
const models = {
  'openai-compatible': compatible('demo'),
  'openai, Responses': openai('demo'),
  'openai, chat': openai.chat('demo'),
  anthropic: createAnthropic({ baseURL, apiKey: 'none' })('demo'),
};
const options = { maxRetries: 0, temperature: 0, maxOutputTokens: 256 };

for (const [name, model] of Object.entries(models)) {
  const whole = await generateText({ model, prompt: hello, ...options });
  assert.equal(whole.text, answer, name);
  assert(whole.usage.outputTokens > 1, name);
  const stream = streamText({ model, prompt: hello, ...options });
  let text = '';
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, answer, name);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens, name);
  const content = [{ type: 'file', data: picture, mediaType: 'image/png' }, { type: 'text', text: 'What colour is the circle?' }];
  const seen = await generateText({ model, messages: [{ role: 'user', content }], ...options });
  assert.equal(seen.text, 'Red.', name);
  const { object } = await generateObject({ model, schema, prompt: 'A shape.', ...options });
  assert(schema.safeParse(object).success, name);
  const objects = streamObject({ model, schema, prompt: 'A shape.', ...options });
  for await (const _ of objects.partialObjectStream);
  assert(schema.safeParse(await objects.object).success, name);
  const tools = { paint: tool({ inputSchema: schema, execute: async ({ colour }) => `painted ${colour}` }) };
  const called = await generateText({ model, prompt: 'Draw.', tools, toolChoice: { type: 'tool', toolName: 'paint' }, ...options });
  assert.equal(called.toolCalls[0].toolName, 'paint', name);
  assert.match(called.toolResults[0].output, /^painted (red|green)$/, name);
  const refused = generateText({ model, prompt: hello, ...options, topP: 7, temperature: undefined });
  await assert.rejects(refused, (error) => APICallError.isInstance(error) && error.statusCode === 400 && /top_p/.test(error.message), name);
  const controller = new AbortController();
  const left = streamText({ model, prompt: 'What can you do?', ...options, maxOutputTokens: 2000, abortSignal: controller.signal });
  for await (const _ of left.textStream) break;
  controller.abort();
}
const { embeddings } = await embedMany({ model: compatible.embeddingModel('demo'), values: ['red', 'blue'] });
assert.equal(embeddings.length, 2);
assert(Math.abs(embeddings[0].reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4);
