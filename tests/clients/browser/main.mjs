// The `openai` client on a page of another origin, in Chromium. This program is the server of the page.
import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { json, text } from "node:stream/consumers";

const [url, model, name, path] = process.argv.slice(2);
const page = '<!doctype html><link rel="icon" href="data:,"><script src="/page.js"></script>';
const files = { "/page.js": new URL("page.js", import.meta.url), "/file": path };
const port = process.env.PAGE_PORT;
const profile = mkdtempSync(join(tmpdir(), "chromium-"));

async function end(outcome) {
  console.log(JSON.stringify(outcome));
  if (name === "cancel") await text(process.stdin);
  browser.once("exit", () => {
    rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
    process.exit();
  });
  browser.kill();
}

const server = createServer(async (request, response) => {
  const known = new URL(request.url, "http://page").pathname;
  response.end(files[known] ? readFileSync(files[known]) : page);
  if (known === "/outcome") end(await json(request));
});
await new Promise((resolve) => server.listen(port, "127.0.0.1", resolve));
const address = `http://127.0.0.1:${port}/?${new URLSearchParams({ url, model, name })}`;
const options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", `--user-data-dir=${profile}`];
const browser = spawn("chromium", [...options, address], { stdio: "ignore" });
