"""The same requests to the real Ollama and to `serve`: responses differ only as docs/reference/ollama-api.md lists.

Compared are statuses, media types, the lines of streams, and the JSON members with their types; texts, times and
counts are not compared. Both sides serve the same weights, `serve` with llama.cpp.

If a difference is new or gone, the test prints the row of the table. The reason of a row is written by hand, and rows
with the same reason may be joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from loadtest import tiny_gguf
from tests.support.go_programs import BuildError
from tests.support.harness.serve.serve import Document, fake, model, serving
from tests.support.real_services import ollama

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "ollama-api.md"
SENTENCE = "Hello, I am Ada, asleep until you called."
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
"""What `calls` generates. Ollama recognizes it by the template. llama.cpp recognizes no call of this model, so that the
engine of `serve` is the fake one there.
"""
CALLS_TEMPLATE = (
    "{{ range .Tools }}{{ . }}\n{{ end }}{{ range .Messages }}{{ .Content }}"
    '{{ range .ToolCalls }}{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}{{ end }}\n'
    "{{ end }}<|say|>"
)
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
USER = {"role": "user", "content": "Hello"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SHORT = {"num_predict": 4}

Response = Mapping[str, str]
"""What is compared: an aspect or a member of a response, and its value or type."""
MISSING = "-"


class Step(NamedTuple):
    """One request of the transcript."""

    name: str
    method: str
    path: str
    body: object = None
    """JSON, or bytes as they are."""


def chat(name: str, **members: object) -> Step:
    """A chat without streaming."""
    return Step(f"chat, {name}", "POST", "/api/chat", {"model": "ada", "messages": [USER], "stream": False, **members})


def generate(name: str, **members: object) -> Step:
    """A prompt without streaming."""
    body = {"model": "ada", "prompt": "Who?", "stream": False, **members}
    return Step(f"generate, {name}", "POST", "/api/generate", body)


def embed(name: str, **members: object) -> Step:
    """An embedding."""
    return Step(f"embed, {name}", "POST", "/api/embed", {"model": "emb", "input": "one", **members})


TRANSCRIPT = (
    Step("version", "GET", "/api/version"),
    Step("version, HEAD", "HEAD", "/api/version"),
    Step("tags", "GET", "/api/tags"),
    Step("tags, HEAD", "HEAD", "/api/tags"),
    Step("root", "GET", "/"),
    Step("root, HEAD", "HEAD", "/"),
    Step("show", "POST", "/api/show", {"model": "ada"}),
    Step("show, name", "POST", "/api/show", {"name": "ada:latest"}),
    Step("show, verbose", "POST", "/api/show", {"model": "ada", "verbose": True}),
    Step("ps, nothing loaded", "GET", "/api/ps"),
    chat("load", messages=[]),
    chat("load, keep_alive", messages=[], keep_alive="5m"),
    Step("chat, load, only a model", "POST", "/api/chat", {"model": "ada"}),
    generate("load", prompt=""),
    Step("generate, load, only a model", "POST", "/api/generate", {"model": "ada", "keep_alive": -1}),
    Step("ps, loaded", "GET", "/api/ps"),
    chat("whole"),
    chat("stream", stream=True),
    Step("chat, stream by default", "POST", "/api/chat", {"model": "ada:latest", "messages": [USER]}),
    chat("system", messages=[{"role": "system", "content": "Be brief."}, USER]),
    chat("token limit", options=SHORT),
    chat("stream, token limit", options=SHORT, stream=True),
    chat("options", options={"seed": 1, "stop": ["Ada"], "top_k": 3, "mirostat": 0, "num_ctx": 2048, "unknown": 1}),
    chat("logprobs", logprobs=True, top_logprobs=2),
    chat("stream, logprobs", logprobs=True, stream=True),
    chat("JSON", format="json", options=SHORT),
    chat("schema", format=SCHEMA, options=SHORT),
    chat("think false", think=False),
    chat("think, model without thinking", think=True),
    chat("image, model without vision", messages=[{**USER, "images": [PIXEL]}]),
    chat("tools, model without tools", tools=[WEATHER]),
    chat("tools", model="calls", tools=[WEATHER]),
    chat("stream, tools", model="calls", tools=[WEATHER], stream=True),
    chat(
        "tool result",
        messages=[USER, CALLED, {"role": "tool", "tool_name": "weather", "content": "Rain."}],
        options=SHORT,
    ),
    generate("whole"),
    generate("stream", stream=True),
    Step("generate, stream by default", "POST", "/api/generate", {"model": "ada", "prompt": "Who?"}),
    generate("raw", raw=True, prompt="Who?<|say|>"),
    generate("stream, raw", raw=True, prompt="Who?<|say|>", stream=True),
    generate("system", system="Be brief."),
    generate("context", context=[1, 2, 3]),
    generate("template", template="{{ .Prompt }}<|say|>"),
    generate("suffix, model without insertion", suffix="end", options=SHORT),
    generate("JSON", format="json", options=SHORT),
    generate("image, model without vision", images=[PIXEL]),
    generate("logprobs", logprobs=True),
    embed("text"),
    embed("texts", input=["one", "two words"]),
    embed("nothing", input=[]),
    embed("no input", input=None),
    embed("truncate, options", truncate=True, options={"num_ctx": 128}, keep_alive="1m"),
    embed("dimensions", dimensions=8),
    embed("model for chats", model="ada"),
    Step("embeddings", "POST", "/api/embeddings", {"model": "emb", "prompt": "one"}),
    Step("embeddings, nothing", "POST", "/api/embeddings", {"model": "emb", "prompt": ""}),
    chat("model for embeddings", model="emb", options=SHORT),
    chat("unload", messages=[], keep_alive=0),
    generate("unload", prompt="", keep_alive="0s"),
    Step("embed, unload", "POST", "/api/embed", {"model": "emb", "keep_alive": 0}),
    chat("unknown model", model="none"),
    chat("stream, unknown model", model="none", stream=True),
    generate("unknown model", model="none"),
    generate("unload, unknown model", model="none", prompt="", keep_alive=0),
    embed("unknown model", model="none"),
    Step("embeddings, unknown model", "POST", "/api/embeddings", {"model": "none", "prompt": "one"}),
    Step("show, unknown model", "POST", "/api/show", {"model": "none"}),
    Step("chat, no model", "POST", "/api/chat", {"messages": [USER]}),
    Step("generate, no model", "POST", "/api/generate", {"prompt": "Who?"}),
    Step("show, no model", "POST", "/api/show", {}),
    Step("chat, no body", "POST", "/api/chat", b""),
    Step("generate, no body", "POST", "/api/generate", b""),
    Step("embed, no body", "POST", "/api/embed", b""),
    Step("show, no body", "POST", "/api/show", b""),
    Step("chat, no JSON", "POST", "/api/chat", b"{"),
    Step("chat, JSON and more", "POST", "/api/chat", json.dumps(chat("").body).encode() + b" x"),
    Step("chat, list", "POST", "/api/chat", []),
    chat("messages as text", messages="x"),
    chat("model as number", model=1),
    chat("stream as text", stream="yes"),
    chat("content as parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]),
    chat("unknown role", messages=[{"role": "wizard", "content": "Who?"}]),
    chat("keep_alive of another unit", keep_alive="5 parsecs"),
    chat("think of another level", think="often"),
    chat("format as number", format=5),
    chat("format of another name", format="xml"),
    chat("option of another type", options={"temperature": "hot"}),
    chat("image that is no base64", messages=[{**USER, "images": ["?"]}]),
    chat("top_logprobs out of range", logprobs=True, top_logprobs=99),
    Step("chat, other case", "POST", "/api/chat", {"Model": "ada", "messages": [USER], "stream": False}),
    Step("chat, GET", "GET", "/api/chat"),
    Step("tags, POST", "POST", "/api/tags", {}),
    Step("unknown path", "GET", "/api/none"),
    Step("pull", "POST", "/api/pull", {"model": "localhost:1/a/b", "insecure": True, "stream": False}),
    Step("push", "POST", "/api/push", {"model": "localhost:1/a/b", "insecure": True, "stream": False}),
    Step("create", "POST", "/api/create", {"model": "eve", "from": "ada", "stream": False}),
    Step("copy", "POST", "/api/copy", {"source": "ada", "destination": "bob"}),
    Step("delete", "DELETE", "/api/delete", {"model": "ada"}),
    Step("delete, unknown model", "DELETE", "/api/delete", {"model": "none"}),
    Step("blobs", "HEAD", f"/api/blobs/sha256:{'0' * 64}"),
)


# --- what is compared ------------------------------------------------------------------------------------------------


def read_members(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each member of a JSON value by its path, with its type. Members of `model_info` depend on the model."""
    if path in {"embedding", "embeddings[]"} and isinstance(value, list):
        yield path, f"array of {len(value)} numbers"
        return
    if path:
        yield path, TYPES[type(value)]
    if isinstance(value, dict) and path != "model_info":
        for name, inner in value.items():
            yield from read_members(inner, f"{path}.{name}".removeprefix("."))
    if isinstance(value, list):
        for inner in value:
            yield from read_members(inner, f"{path}[]")


TYPES = {
    dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null",
}  # fmt: skip


def describe(status: int, kind: str, body: bytes) -> Response:
    """Describe a response: its status, media type, lines and members. Members of the last line have that prefix."""
    out = {"HTTP status": str(status), "media type": kind.partition(";")[0] or MISSING}
    lines = body.splitlines()
    try:
        documents = [json.loads(line) for line in lines]
    except ValueError:
        return out | {"body": "text"}
    out["body"] = "nothing" if not body else "JSON" if len(lines) == 1 else "lines of JSON"
    if len(lines) > 1:
        out["body"] += "" if body.endswith(b"\n") else ", the last one without an end"
        for line in documents[:-1]:
            _add(out, line, "")
    if documents:
        _add(out, documents[-1], "last line: " if len(lines) > 1 else "")
    return out


def _add(out: dict[str, str], document: object, prefix: str) -> None:
    for path, kind in read_members(document):
        known = out.get(prefix + path, "").split(" or ")
        out[prefix + path] = " or ".join(sorted({kind, *known} - {""}))


def compare(theirs: Response, ours: Response) -> Iterator[tuple[str, str, str]]:
    """Yield (aspect, Ollama, Pilotlight) where responses differ: of a success and an error only the status, of JSON and
    a text only the media type, and of a missing member nothing inside.
    """
    both = [(name, theirs.get(name, MISSING), ours.get(name, MISSING)) for name in {**theirs, **ours}]
    rows = [row for row in both if row[1] != row[2]]
    missing = tuple(f"{name}{inner}" for name, *values in rows if MISSING in values for inner in ".[")
    rows = [row for row in rows if not row[0].startswith(missing)] if missing else rows
    if theirs["HTTP status"][0] != ours["HTTP status"][0]:
        rows = [row for row in rows if row[0] == "HTTP status"]
    elif "text" in {theirs["body"], ours["body"]}:
        rows = [row for row in rows if row[0] in {"HTTP status", "media type"}]
    yield from rows


# --- the table of the page -------------------------------------------------------------------------------------------

Difference = tuple[str, ...]
"""Request, aspect, Ollama, Pilotlight."""


def read_table(text: str) -> dict[Difference, str]:
    """Return the differences of the page with their reasons. A row may name several requests, separated by `;`."""
    block = text.partition("<!-- differences -->")[2].partition("<!-- /differences -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if "`" in line]
    return {
        (request.strip(), *(cell.strip("`") for cell in row[1:4])): row[4]
        for row in rows
        for request in row[0].split(";")
    }


def render_rows(differences: Iterable[Difference]) -> list[str]:
    """Return rows of the table without reasons, one for the requests that differ in the same way."""
    rows: dict[Difference, list[str]] = {}
    for request, *aspect in differences:
        rows.setdefault(tuple(aspect), []).append(request)
    return [f"| {'; '.join(names)} | {' | '.join(f'`{cell}`' for cell in row)} |" for row, names in rows.items()]


# --- both sides ------------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The folder of the weights of three models."""
    tiny_gguf.make_model(tmp_path / "ada.gguf", SENTENCE, pools=False)
    tiny_gguf.make_model(tmp_path / "calls.gguf", CALL, pools=False)
    tiny_gguf.make_model(tmp_path / "emb.gguf", SENTENCE)
    return tmp_path


@pytest.fixture
def real(weights: Path) -> Iterator[str]:
    """The URL of Ollama with the three models; skips the test if it has not been built."""
    try:
        with ollama.serving(weights) as server:
            server.create("ada", weights / "ada.gguf", ollama.CHAT_TEMPLATE)
            server.create("calls", weights / "calls.gguf", CALLS_TEMPLATE)
            server.create("emb", weights / "emb.gguf", ollama.CHAT_TEMPLATE)
            yield server.url
    except BuildError as error:
        pytest.skip(str(error))


def document(folder: Path, name: str, *args: str) -> Document:
    """A Model with llama.cpp."""
    artifact, args = f"file://{folder}/{name}.gguf", ("--threads=1", *args)
    return model(name, engine="llama.cpp", artifact=artifact, args=list(args), gpu={"memory": "30Mi"})


async def run_transcript(url: str) -> dict[str, Response]:
    """Send the requests, one after another."""
    out: dict[str, Response] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        for step in TRANSCRIPT:
            assert step.name not in out
            data = step.body if isinstance(step.body, bytes) else None
            given = {"data": data} if step.body is None or data is not None else {"json": step.body}
            async with session.request(step.method, url + step.path, **given) as response:
                body = await response.read()
                out[step.name] = describe(response.status, response.headers.get("content-type", ""), body)
    return out


async def test_responses_differ_from_those_of_the_real_ollama_only_as_documented(real: str, weights: Path) -> None:
    theirs = await run_transcript(real)
    documents = [document(weights, "ada"), fake(weights, "calls"), document(weights, "emb", "--embeddings")]
    async with serving(weights / "serve", *documents) as serve:
        ours = await run_transcript(serve.url)
    found = [(name, *row) for name, response in theirs.items() for row in compare(response, ours[name])]
    documented = read_table(PAGE.read_text())
    new = render_rows(row for row in found if row not in documented)
    gone = render_rows(row for row in documented if row not in found)
    assert not new + gone, "\n".join(["not in the table:", *new, "only in the table:", *gone])
    assert all(documented.values()), "each difference has a reason"
