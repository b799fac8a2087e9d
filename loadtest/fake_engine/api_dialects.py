"""Parses requests to the fake engine and renders its responses in each dialect. Pure: no I/O.

Renders OpenAI chat, completions, embeddings and transcriptions, and Anthropic messages, as documents and as server-sent
events, like llama-server. The words of a response are exactly its tokens. A request with tools is answered with a call
of its first tool, until it contains the result of a tool. A JSON schema is answered with a value of that schema, and a
recording with the SHA-256 of its bytes. Nothing else of a body is read, so clients cannot control the fake engine. Uses
only the standard library, because it starts faster without site-packages.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import time
from typing import NamedTuple, cast

Json = dict[str, object]

TOKENS_MAX = 100_000
"""Limit per response, all of which may be in the send buffer of a client that does not read."""


class BadRequestError(Exception):
    """The request is not acceptable to this engine."""


class Head(NamedTuple):
    """A parsed request head. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body_bytes: int
    keep_alive: bool
    query: str


def parse_head(raw: bytes) -> Head:
    """Parse the head without its empty line. Raises BadRequestError for anything but plain HTTP/1.x."""
    try:
        first, *lines = raw.decode("latin-1").split("\r\n")
        method, target, version = first.split(" ")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip() or name.lower() in headers:
                raise BadRequestError(f"bad header line {name[:40]!r}")
            headers[name.lower()] = value.strip()
        length = headers.get("content-length", "0")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not length.isdecimal() or "transfer-encoding" in headers:
            raise BadRequestError("send HTTP/1.x with a Content-Length")
    except ValueError as error:
        raise BadRequestError("not an HTTP request") from error
    keep = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
    path, _, query = target.partition("?")
    return Head(method, path, headers, int(length), keep, query)


class Ask(NamedTuple):
    """The parsed body of an inference request."""

    model: str
    stream: bool = False
    usage: bool = False
    tokens_max: int | None = None
    inputs: list[str] = []
    prompt_tokens: int = 0
    base64: bool = False
    """Whether vectors are sent as base64 of 32-bit floats."""
    tool: str = ""
    """The tool to call, if any; `text` has its arguments."""
    text: str = ""
    """The text of the response, if it is not the engine's sentence."""


def read_ask(body: bytes, content_type: str = "application/json") -> Ask:
    """Parse the members that this engine uses. Raises BadRequestError for a body that is not JSON and no form."""
    if content_type.startswith("multipart/form-data"):
        return _read_form(body, content_type)
    try:
        document = json.loads(body)
    except ValueError as error:
        raise BadRequestError("the body is not JSON") from error
    if not isinstance(document, dict):
        raise BadRequestError("the body is not a JSON object")
    limits = [document.get(key) for key in ("max_completion_tokens", "max_tokens")]
    options = document.get("stream_options")
    inputs = document.get("input")
    tool, schema = _called_tool(document) or ("", _output_schema(document))
    return Ask(
        model=str(document.get("model", "")),
        stream=document.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        tokens_max=next((limit for limit in limits if isinstance(limit, int) and limit >= 0), None),
        inputs=[str(item) for item in inputs] if isinstance(inputs, list) else [str(inputs or "")],
        prompt_tokens=len(str(document.get("messages") or document.get("prompt") or inputs or "").split()),
        base64=document.get("encoding_format") == "base64",
        tool=tool,
        text="" if schema is None else json.dumps(example_value(schema, schema)),
    )


def _read_form(body: bytes, content_type: str) -> Ask:
    """Parse a form with a model and a file."""
    boundary = re.search(r'boundary="?([^";]+)', content_type)
    parts = body.split(b"--" + boundary[1].encode()) if boundary else []
    model = file = b""
    for head, _, content in (part.partition(b"\r\n\r\n") for part in parts):
        if re.search(rb"\bname=\"?file\b", head):
            file = content.removesuffix(b"\r\n")
        elif re.search(rb"\bname=\"?model\b", head):
            model = content.removesuffix(b"\r\n")
    return Ask(model.decode(), text=hashlib.sha256(file).hexdigest())


def _called_tool(document: Json) -> tuple[str, Json] | None:
    """Return the name and the schema of the first tool, or None if a result of a tool was sent, or no tool."""
    messages, tools = document.get("messages"), document.get("tools")
    if not isinstance(tools, list) or not tools or '"tool_result"' in json.dumps(messages):
        return None
    if isinstance(messages, list) and any(message.get("role") == "tool" for message in messages):
        return None
    tool = cast("Json", tools[0].get("function", tools[0]))
    return str(tool["name"]), cast("Json", tool.get("parameters") or tool.get("input_schema") or {})


def _output_schema(document: Json) -> Json | None:
    """Return the JSON schema of the response, in the form of OpenAI or Anthropic."""
    for name in ("response_format", "output_format", "output_config"):
        given = document.get(name)
        given = given.get("format", given) if isinstance(given, dict) else {}
        if given.get("type") == "json_object":
            return {"type": "object"}
        if given.get("type") == "json_schema":
            return cast("Json", given.get("schema") or given["json_schema"]["schema"])
    return None


def example_value(schema: Json, root: Json) -> object:
    """Return a value of the schema; `root` contains the definitions to which it refers."""
    if isinstance(target := schema.get("$ref"), str):
        definitions = cast("dict[str, Json]", root.get("$defs") or root.get("definitions"))
        return example_value(definitions[target.rpartition("/")[2]], root)
    for key in ("enum", "anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list):
            return options[0] if key == "enum" else example_value(options[0], root)
    kind = schema.get("type", "object")
    if kind == "object":
        members = cast("dict[str, Json]", schema.get("properties") or {})
        return {name: example_value(member, root) for name, member in members.items()}
    if kind == "array":
        return [example_value(cast("Json", schema.get("items") or {"type": "string"}), root)]
    return {"integer": 1, "number": 1.5, "boolean": True, "null": None}.get(str(kind), "text")


def tokens_of(sentence: str, count: int, ask: Ask) -> tuple[list[str], str]:
    """Return `count` tokens, or as many as `ask` permits, and the finish reason. The tokens are the sentence's words,
    repeated as needed; with `count` 0 each word occurs once. The text of `ask` replaces the sentence.
    """
    if ask.text:
        sentence, count = ask.text, 0
    words = sentence.split(" ")
    count = min(count or len(words), TOKENS_MAX)
    limit = count if ask.tokens_max is None else min(count, ask.tokens_max)
    tokens = [(" " if i else "") + words[i % len(words)] for i in range(limit)]
    return tokens, "length" if limit < count else "stop"


def render_event(document: Json, name: str = "") -> bytes:
    """Return one server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(document).encode() + b"\n\n"


class Answer:
    """Renders /v1/chat/completions: one document, or an opening, one event per token, and a closing.

    Subclasses override what differs for other paths. `tokens` join to the whole text; `finish` is "stop" or "length".
    """

    KIND, OBJECT = "chat.completion", "chat.completion.chunk"

    def __init__(self, ask: Ask, number: int, tokens: list[str], finish: str) -> None:
        self.ask, self.tokens, self.finish = ask, tokens, finish
        self.base: Json = {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": ask.model}
        self.usage: Json = {
            "prompt_tokens": ask.prompt_tokens,
            "completion_tokens": len(tokens),
            "total_tokens": ask.prompt_tokens + len(tokens),
        }

        if ask.tool and finish == "stop":
            self.finish = "tool_calls"

    def document(self) -> Json:
        """Return the whole response."""
        text = "".join(self.tokens)
        message: Json = {"role": "assistant", "content": text}
        if self.ask.tool:
            message = {"role": "assistant", "content": None, "tool_calls": [self._tool_call(text)]}
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        return {**self.base, "object": self.KIND, "choices": [choice], "usage": self.usage}

    def _tool_call(self, arguments: str) -> Json:
        name = {"name": self.ask.tool, "arguments": arguments}
        return {"index": 0, "id": f"call_{self.base['id']}", "type": "function", "function": name}

    def _event(self, finish: str | None, **choice: object) -> bytes:
        return render_event(
            {**self.base, "object": self.OBJECT, "choices": [{"index": 0, "finish_reason": finish, **choice}]}
        )

    def opening(self) -> bytes:
        """Return the start of a stream."""
        calls: Json = {"tool_calls": [self._tool_call("")]} if self.ask.tool else {}
        return self._event(None, delta={"role": "assistant", "content": None, **calls})

    def token(self, text: str) -> bytes:
        """Return one token of a stream."""
        if self.ask.tool:
            return self._event(None, delta={"tool_calls": [{"index": 0, "function": {"arguments": text}}]})
        return self._event(None, delta={"content": text})

    def last(self) -> bytes:
        """Return the event with the finish reason."""
        return self._event(self.finish, delta={})

    def closing(self) -> list[bytes]:
        """Return the end of a stream."""
        usage = (
            [render_event({**self.base, "object": self.OBJECT, "choices": [], "usage": self.usage})]
            if self.ask.usage
            else []
        )
        return [self.last(), *usage, b"data: [DONE]\n\n"]


class _Completion(Answer):
    """Renders /v1/completions."""

    KIND = OBJECT = "text_completion"

    def document(self) -> Json:
        choice = {"index": 0, "text": "".join(self.tokens), "finish_reason": self.finish, "logprobs": None}
        return {**self.base, "object": self.KIND, "choices": [choice], "usage": self.usage}

    def opening(self) -> bytes:
        return b""

    def token(self, text: str) -> bytes:
        return self._event(None, text=text, logprobs=None)

    def last(self) -> bytes:
        return self._event(self.finish, text="", logprobs=None)


class _Embedding(Answer):
    """Renders /v1/embeddings: always one document, never a stream."""

    def __init__(self, ask: Ask, number: int, tokens: list[str], finish: str) -> None:
        super().__init__(ask._replace(stream=False), number, tokens[:0], finish)

    def document(self) -> Json:
        vectors = [[len(text) / 100.0, 0.5, 0.25, 0.125] for text in self.ask.inputs]
        encoded = [base64.b64encode(struct.pack("<4f", *vector)).decode() for vector in vectors]
        rows = encoded if self.ask.base64 else vectors
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
        usage = {"prompt_tokens": self.ask.prompt_tokens, "total_tokens": self.ask.prompt_tokens}
        return {"object": "list", "model": self.ask.model, "data": data, "usage": usage}


class _Message(Answer):
    """Renders Anthropic's /v1/messages."""

    def _message(self, content: list[Json], stop: str | None, output_tokens: int) -> Json:
        usage = {"input_tokens": self.ask.prompt_tokens, "output_tokens": output_tokens}
        base = {"id": f"msg_{self.base['id']}", "type": "message", "role": "assistant", "model": self.ask.model}
        return {**base, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage}

    @property
    def stop(self) -> str:
        """Anthropic's name of the finish reason."""
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(self.finish, "end_turn")

    def _block(self, text: str) -> Json:
        if self.ask.tool:
            arguments = json.loads(text) if text else {}
            return {"type": "tool_use", "id": f"toolu_{self.base['id']}", "name": self.ask.tool, "input": arguments}
        return {"type": "text", "text": text}

    def document(self) -> Json:
        return self._message([self._block("".join(self.tokens))], self.stop, len(self.tokens))

    def opening(self) -> bytes:
        start = {"type": "content_block_start", "index": 0, "content_block": self._block("")}
        message: Json = {"type": "message_start", "message": self._message([], None, 0)}
        return render_event(message, "message_start") + render_event({**start}, "content_block_start")

    def token(self, text: str) -> bytes:
        delta = {"type": "text_delta", "text": text}
        if self.ask.tool:
            delta = {"type": "input_json_delta", "partial_json": text}
        return render_event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")

    def closing(self) -> list[bytes]:
        delta: Json = {"stop_reason": self.stop, "stop_sequence": None}
        end: Json = {"type": "message_delta", "delta": delta, "usage": {"output_tokens": len(self.tokens)}}
        return [
            render_event({"type": "content_block_stop", "index": 0}, "content_block_stop"),
            render_event(end, "message_delta"),
            render_event({"type": "message_stop"}, "message_stop"),
        ]


class _Transcription(Answer):
    """Renders /v1/audio/transcriptions."""

    def document(self) -> Json:
        return {"text": "".join(self.tokens)}


DIALECTS: dict[str, type[Answer]] = {
    "/v1/chat/completions": Answer,
    "/v1/completions": _Completion,
    "/v1/embeddings": _Embedding,
    "/v1/messages": _Message,
    "/v1/audio/transcriptions": _Transcription,
}
