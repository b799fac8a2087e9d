// The page: runs one behaviour of the `openai` client and sends its outcome to the server of the page.
import { behaviours, outcome } from "./behaviours.mjs";

const { url, model, name } = Object.fromEntries(new URLSearchParams(location.search));
const file = async () => new File([await (await fetch("/file")).blob()], "speech.wav");
const report = (value) => fetch("/outcome", { method: "POST", body: JSON.stringify(value) });
const all = behaviours({ url, model, file, dangerouslyAllowBrowser: true });
outcome(name, all).then(report, (error) => report({ failed: String(error.stack) }));
