// The `ollama` client for JavaScript.
import { Ollama } from "ollama";
import { text } from "node:stream/consumers";

const [host, model, name] = process.argv.slice(2);
const client = new Ollama({ host });
const messages = [{ role: "user", content: "Who is there?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city", parameters } }];
const format = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
};
const ask = (more) => client.chat({ model, messages, ...more });

const behaviours = {
  async list() {
    return { models: (await client.list()).models.map((one) => one.model) };
  },
  async chat() {
    return { text: (await ask()).message.content };
  },
  async stream() {
    const parts = [];
    for await (const part of await ask({ stream: true })) parts.push(part.message.content);
    return { parts: parts.filter(Boolean) };
  },
  async tools() {
    const { message } = await ask({ tools });
    const call = message.tool_calls[0].function;
    const result = { role: "tool", tool_name: call.name, content: "18 degrees" };
    const last = await ask({ tools, messages: [...messages, message, result] });
    return { tool: call.name, arguments: call.arguments, text: last.message.content };
  },
  async structured() {
    return { object: (await ask({ format })).message.content };
  },
  async embeddings() {
    return { vectors: (await client.embed({ model, input: ["one", "two words"] })).embeddings };
  },
  async cancel() {
    const stream = await ask({ stream: true });
    try {
      for await (const part of stream) {
        if (part.message.content) return { text: part.message.content };
      }
    } finally {
      stream.abort();
    }
  },
};

let outcome;
try {
  outcome = await behaviours[["error", "cold_start"].includes(name) ? "chat" : name]();
} catch (error) {
  if (name !== "error") throw error;
  outcome = { error: error.name, status: error.status_code, code: null, message: error.message };
}
console.log(JSON.stringify(outcome));
if (name === "cancel") await text(process.stdin);
process.exit();
