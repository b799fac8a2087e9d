// The behaviours of the `openai` client, for Node and for browsers.
import OpenAI from "openai";

const messages = [{ role: "user", content: "Who is there?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city", parameters } }];
const person = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

export function behaviours({ url, model, file, ...options }) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none-needed", ...options });
  const create = (more) => client.chat.completions.create({ model, messages, ...more });
  return {
    async list() {
      const models = [];
      for await (const one of client.models.list()) models.push(one.id);
      return { models };
    },
    async chat() {
      return { text: (await create()).choices[0].message.content };
    },
    async stream() {
      const parts = [];
      for await (const event of await create({ stream: true })) parts.push(event.choices[0]?.delta?.content);
      return { parts: parts.filter(Boolean) };
    },
    async tools() {
      const message = (await create({ tools })).choices[0].message;
      const [call] = message.tool_calls;
      const result = { role: "tool", tool_call_id: call.id, content: "18 degrees" };
      const last = await create({ tools, messages: [...messages, message, result] });
      const { name, arguments: given } = call.function;
      return { tool: name, arguments: given, text: last.choices[0].message.content };
    },
    async structured() {
      const response_format = { type: "json_schema", json_schema: { name: "person", schema: person, strict: true } };
      const answer = await client.chat.completions.parse({ model, messages, response_format });
      return { object: answer.choices[0].message.parsed ?? answer.choices[0].message.content };
    },
    async embeddings() {
      const answer = await client.embeddings.create({ model, input: ["one", "two words"] });
      return { vectors: answer.data.map((row) => Array.from(row.embedding)) };
    },
    async upload() {
      return { text: (await client.audio.transcriptions.create({ model, file: await file() })).text };
    },
    async cancel() {
      for await (const event of await create({ stream: true })) {
        const text = event.choices[0]?.delta?.content;
        if (text) return { text }; // leaving the loop aborts the request
      }
    },
  };
}

export async function outcome(name, all) {
  try {
    return await all[["error", "cold_start"].includes(name) ? "chat" : name]();
  } catch (error) {
    if (name !== "error") throw error;
    return { error: error.constructor.name, status: error.status, code: error.code, message: error.message };
  }
}
