// The `openai` client for Node.
import { createReadStream } from "node:fs";
import { text } from "node:stream/consumers";
import { behaviours, outcome } from "./behaviours.mjs";

const [url, model, name, path] = process.argv.slice(2);
const file = () => createReadStream(path);
console.log(JSON.stringify(await outcome(name, behaviours({ url, model, file }))));
if (name === "cancel") await text(process.stdin);
process.exit();
