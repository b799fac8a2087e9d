// The AI SDK of Vercel with its provider for servers that are compatible with OpenAI; `@ai-sdk/openai` for transcription.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, experimental_transcribe, generateText, isStepCount, Output, streamText, tool } from "ai";
import { readFile } from "node:fs/promises";
import { text } from "node:stream/consumers";
import { z } from "zod";

const [url, name, behaviour, path] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "pilotlight",
  baseURL: `${url}/v1`,
  apiKey: "none-needed",
  supportsStructuredOutputs: true,
});
const model = provider(name);
const prompt = "Who is there?";

const behaviours = {
  async chat() {
    return { text: (await generateText({ model, prompt })).text };
  },
  async stream() {
    const parts = [];
    for await (const part of streamText({ model, prompt }).textStream) parts.push(part);
    return { parts };
  },
  async tools() {
    const calls = [];
    const execute = (given) => calls.push(given) && "18 degrees";
    const inputSchema = z.object({ city: z.string() });
    const tools = { weather: tool({ description: "The weather in a city", inputSchema, execute }) };
    const answer = await generateText({ model, prompt, tools, stopWhen: isStepCount(2) });
    return { tool: answer.steps[0].toolCalls[0].toolName, arguments: calls[0], text: answer.text };
  },
  async structured() {
    const schema = z.object({ name: z.string(), age: z.number().int() });
    return { object: (await generateText({ model, prompt, output: Output.object({ schema }) })).output };
  },
  async embeddings() {
    const answer = await embedMany({ model: provider.embeddingModel(name), values: ["one", "two words"] });
    return { vectors: answer.embeddings };
  },
  async upload() {
    const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none-needed" });
    const answer = await experimental_transcribe({ model: openai.transcription(name), audio: await readFile(path) });
    return { text: answer.text };
  },
  async cancel() {
    const abort = new AbortController();
    for await (const part of streamText({ model, prompt, abortSignal: abort.signal }).textStream) {
      abort.abort();
      return { text: part };
    }
  },
};

let outcome;
try {
  outcome = await behaviours[["error", "cold_start"].includes(behaviour) ? "chat" : behaviour]();
} catch (error) {
  if (behaviour !== "error") throw error;
  const code = error.data?.error?.code;
  outcome = { error: error.name, status: error.statusCode, code, message: error.message };
}
console.log(JSON.stringify(outcome));
if (behaviour === "cancel") await text(process.stdin);
process.exit();
