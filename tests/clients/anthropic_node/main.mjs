// The `@anthropic-ai/sdk` client for Node.
import Anthropic from "@anthropic-ai/sdk";
import { text } from "node:stream/consumers";

const [url, model, name] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none-needed" });
const messages = [{ role: "user", content: "Who is there?" }];
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "weather", description: "The weather in a city", input_schema }];
const person = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const create = (more) => client.messages.create({ model, max_tokens: 9999, messages, ...more });
const textOf = (message) => message.content.filter((one) => one.type === "text").map((one) => one.text).join("");

const behaviours = {
  async list() {
    const models = [];
    for await (const one of client.models.list()) models.push(one.id);
    return { models };
  },
  async chat() {
    return { text: textOf(await create()) };
  },
  async stream() {
    const parts = [];
    for await (const event of await create({ stream: true })) parts.push(event.delta?.text);
    return { parts: parts.filter(Boolean) };
  },
  async tools() {
    const { content } = await create({ tools });
    const call = content.find((one) => one.type === "tool_use");
    const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "18 degrees" }] };
    const last = await create({ tools, messages: [...messages, { role: "assistant", content }, result] });
    return { tool: call.name, arguments: call.input, text: textOf(last) };
  },
  async structured() {
    const output_config = { format: { type: "json_schema", schema: person } };
    return { object: textOf(await client.messages.parse({ model, max_tokens: 9999, messages, output_config })) };
  },
  async cancel() {
    for await (const event of await create({ stream: true })) {
      if (event.delta?.text) return { text: event.delta.text }; // leaving the loop aborts the request
    }
  },
};

let outcome;
try {
  outcome = await behaviours[["error", "cold_start"].includes(name) ? "chat" : name]();
} catch (error) {
  if (name !== "error") throw error;
  outcome = { error: error.constructor.name, status: error.status, code: null, message: error.message };
}
console.log(JSON.stringify(outcome));
if (name === "cancel") await text(process.stdin);
process.exit();
