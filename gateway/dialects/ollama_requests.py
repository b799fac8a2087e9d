"""Translates requests of Ollama's API (v0.17.4) to OpenAI's API, which all engines serve. Pure.

Only known members are translated, so nothing else of a body reaches an engine. `keep_alive` never changes how long a
Model runs. Images are base64 text; no URL is accepted. The docs page ollama-api.md lists the differences to Ollama.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec
from msgspec import Raw

from gateway.dialects.decoded_structs import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    Message,
    Options,
    ShowRequest,
)
from gateway.dialects.translated_request import (
    CALLS_MAX,
    IMAGES_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    UNREADABLE,
    TranslatedRequest,
    check_count,
    check_items,
    plain_json,
    unreadable_body,
)
from gateway.errors import CallError, invalid_request
from gateway.request.api_routes import CHAT, INFER, Operation
from gateway.request.forbidden_fields import check_case

API_VERSION: Final = "0.17.4"
"""The version of Ollama whose API is served. Clients compare it with the version that they need."""

Endpoint = Literal["chat", "generate", "embed", "embeddings"]
Action = Literal["", "load", "unload"]

COMPLETION: Final = INFER[b"completions"]
EMBEDDING: Final = INFER[b"embeddings"]
_ENDPOINTS: Final[dict[bytes, Endpoint]] = {
    b"/api/chat": "chat",
    b"/api/generate": "generate",
    b"/api/embed": "embed",
    b"/api/embeddings": "embeddings",
}
_TOP_LOGPROBS: Final = range(21)
"""As in Ollama and in OpenAI's API."""
_EFFORTS: Final = ("low", "medium", "high")
_ROLES: Final = ("system", "user", "assistant", "tool")
_IMAGE_TYPES: Final = (("/9j/", "jpeg"), ("iVBORw", "png"), ("R0lGOD", "gif"), ("UklGR", "webp"))
"""The first characters of base64 of each type of image."""
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,")
_DURATION = re.compile(r"[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+|[-+]?0|-1")
_ZERO = re.compile(r"[-+]?(?:0*\.?0*(?:ns|us|µs|μs|ms|s|m|h))+|[-+]?0")

_chat = msgspec.json.Decoder(ChatRequest)
_generate = msgspec.json.Decoder(GenerateRequest)
_embed = msgspec.json.Decoder(EmbedRequest)
_embeddings = msgspec.json.Decoder(EmbeddingsRequest)
_show = msgspec.json.Decoder(ShowRequest)
_members = msgspec.json.Decoder(dict[str, Raw])
_KNOWN: Final = {
    "chat": frozenset(ChatRequest.__struct_fields__),
    "generate": frozenset(GenerateRequest.__struct_fields__),
    "embed": frozenset(EmbedRequest.__struct_fields__),
    "embeddings": frozenset(EmbeddingsRequest.__struct_fields__),
}
"""The members of each body, whose names must have exactly this case (Ollama itself ignores case)."""


class Translated(TranslatedRequest):
    """A translated request of Ollama's API."""

    __slots__ = ("action", "dimensions", "endpoint")

    def __init__(  # noqa: PLR0917  one caller per endpoint passes them in this order
        self, endpoint: Endpoint, model: str, stream: bool, action: Action, target: Operation,
        members: dict[str, object], dimensions: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(model, stream, target, members)
        self.endpoint = endpoint
        self.action = action
        """`load`: the request only starts the model. `unload`: it only asks to stop it."""
        self.dimensions = dimensions
        """The requested length of vectors; 0: that of the model."""


def translate_request(operation: Operation, body: bytes) -> Translated:
    """Translate the body of a request. Raises CallError 400."""
    endpoint = _ENDPOINTS[operation.engine_path]
    check_items(body)
    body = plain_json(body)
    try:
        check_case(_members.decode(body), _KNOWN[endpoint])
        if endpoint == "chat":
            return _translate_chat(_chat.decode(body))
        if endpoint == "generate":
            return _translate_generate(_generate.decode(body))
        if endpoint == "embed":
            return _translate_embed(_embed.decode(body))
        return _translate_embeddings(_embeddings.decode(body))
    except UNREADABLE as error:
        raise unreadable_body(error) from None


def read_shown_model(body: bytes) -> str:
    """Return the model of a request to /api/show. Raises CallError 400."""
    body = plain_json(body)
    try:
        check_case(_members.decode(body), frozenset(ShowRequest.__struct_fields__))
        request = _show.decode(body)
    except UNREADABLE:
        raise invalid_request("the body must be a JSON object with the member model", param="model") from None
    name = request.model or request.name
    if not name:
        raise invalid_request("name the model in the member model", param="model")
    return name


def _translate_chat(request: ChatRequest) -> Translated:
    messages = request.messages or []
    check_count("messages", len(messages), MESSAGES_MAX)
    check_count("images", sum(len(one.images or ()) for one in messages), IMAGES_MAX)
    check_count("tools", len(request.tools or ()), TOOLS_MAX)
    check_count("tool_calls", sum(len(one.tool_calls or ()) for one in messages), CALLS_MAX)
    members: dict[str, object] = {"messages": _messages(request.messages or [])}
    if request.tools:
        members["tools"] = request.tools
    _add_logprobs(members, request.logprobs, request.top_logprobs)
    _add_shared(members, request.options, request.format, request.think)
    stream = _add_stream(members, request.stream)
    action = _action(request.keep_alive, is_empty=not request.messages)
    return Translated("chat", request.model or "", stream, action, CHAT, members)


def _translate_generate(request: GenerateRequest) -> Translated:
    check_count("images", len(request.images or ()), IMAGES_MAX)
    if request.template:
        raise invalid_request("template is not supported: the engine has the template of the model; remove it")
    prompt, members, target = request.prompt or "", dict[str, object](), CHAT
    if request.raw or request.suffix:
        if request.images:
            raise invalid_request(
                "images are not supported together with raw or suffix; remove images, or raw and suffix"
            )
        target = COMPLETION
        members["prompt"] = prompt
        if request.suffix:
            members["suffix"] = request.suffix
        _add_shared(members, request.options, request.format, None)
    else:
        system: list[dict[str, object]] = [{"role": "system", "content": request.system}] if request.system else []
        members["messages"] = [*system, {"role": "user", "content": _content(prompt, request.images)}]
        _add_logprobs(members, request.logprobs, request.top_logprobs)
        _add_shared(members, request.options, request.format, request.think)
    stream = _add_stream(members, request.stream)
    is_empty = not (prompt or request.images or request.suffix)
    action = _action(request.keep_alive, is_empty=is_empty)
    return Translated("generate", request.model or "", stream, action, target, members)


def _translate_embed(request: EmbedRequest) -> Translated:
    members: dict[str, object] = {"input": request.input, "encoding_format": "float"}
    dimensions = max(0, request.dimensions or 0)
    if dimensions:
        members["dimensions"] = dimensions
    action = _action(request.keep_alive, is_empty=not request.input)
    return Translated("embed", request.model or "", False, action, EMBEDDING, members, dimensions)


def _translate_embeddings(request: EmbeddingsRequest) -> Translated:
    members: dict[str, object] = {"input": request.prompt, "encoding_format": "float"}
    action = _action(request.keep_alive, is_empty=not request.prompt)
    return Translated("embeddings", request.model or "", False, action, EMBEDDING, members)


def _action(keep_alive: float | str | None, *, is_empty: bool) -> Action:
    """Return what a request without a prompt is for. Raises CallError 400 for an invalid `keep_alive`."""
    is_zero = keep_alive == 0
    if isinstance(keep_alive, str) and keep_alive:
        if len(keep_alive) > 64 or not _DURATION.fullmatch(keep_alive):
            raise invalid_request('keep_alive must be a number of seconds or a duration such as "5m"')
        is_zero = _ZERO.fullmatch(keep_alive) is not None
    if not is_empty:
        return ""
    return "unload" if is_zero else "load"


def _add_stream(members: dict[str, object], stream: bool | None) -> bool:
    """Set `stream`, which is true by default."""
    streams = stream is not False
    if streams:
        members["stream"] = True
    return streams


def _add_logprobs(members: dict[str, object], logprobs: bool | None, top: int | None) -> None:
    """Set the members for log probabilities, which chats and prompts in the form of chats have."""
    if top is not None and top not in _TOP_LOGPROBS:
        raise invalid_request(f"top_logprobs must be between 0 and {_TOP_LOGPROBS[-1]}", param="top_logprobs")
    if logprobs:
        members["logprobs"] = True
        if top is not None:
            members["top_logprobs"] = top


def _add_shared(
    members: dict[str, object], options: Options | None, form: Raw, think: bool | str | None
) -> None:  # fmt: skip
    """Set the members for `options`, `format` and `think`."""
    if options is not None:
        _add_options(members, options)
    value = bytes(form)
    if value == b'"json"':
        members["response_format"] = {"type": "json_object"}
    elif value.startswith(b"{"):
        members["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}
    elif value not in (b"", b"null", b'""'):
        raise invalid_request('format must be "json" or a JSON schema')
    if isinstance(think, str):
        if think not in _EFFORTS:
            raise invalid_request("think must be true, false, low, medium or high")
        members["reasoning_effort"] = think
    elif think is not None:
        members["chat_template_kwargs"] = {"enable_thinking": think}


def _add_options(members: dict[str, object], options: Options) -> None:
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"):
        value = getattr(options, name)
        if value is not None:
            members[name] = value
    if options.num_predict is not None and options.num_predict > 0:
        members["max_tokens"] = options.num_predict
    if options.repeat_penalty is not None:
        members["repeat_penalty"] = options.repeat_penalty  # llama.cpp
        members["repetition_penalty"] = options.repeat_penalty  # vLLM and SGLang


class _OpenCalls:
    """Tool calls without a result, in order."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ids: dict[str, dict[str, None]] = {}

    def add(self, name: str, id: str) -> None:
        if id not in self._names:
            self._names[id] = name
            self._ids.setdefault(name, {})[id] = None

    def answered(self, message: Message) -> str:
        """Return the id of the call that a tool message answers: the named one, else the first of its name, else the
        first without a result.
        """
        id = message.tool_call_id
        if not id:
            named = None if message.tool_name is None else self._ids.get(message.tool_name)
            id = next(iter(named or self._names), "call_0")
        name = self._names.pop(id, None)
        if name is not None:
            del self._ids[name][id]
        return id


def _messages(messages: list[Message]) -> list[dict[str, object]]:
    """Translate messages. OpenAI's tool results refer to the id of a call, which Ollama's clients need not send."""
    out: list[dict[str, object]] = []
    waiting = _OpenCalls()
    for position, message in enumerate(messages):
        if message.role not in _ROLES:
            raise invalid_request("the role of a message must be system, user, assistant or tool", param="messages")
        made: dict[str, object] = {"role": message.role, "content": _content(message.content or "", message.images)}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for number, call in enumerate(message.tool_calls):
                id = call.id or f"call_{position}_{number}"
                arguments = bytes(call.function.arguments) or b"{}"
                if not arguments.startswith(b"{"):
                    raise invalid_request("the arguments of a tool call must be an object", param="messages")
                function = {"name": call.function.name, "arguments": arguments.decode()}
                calls.append({"id": id, "type": "function", "function": function})
                waiting.add(call.function.name, id)
            made["tool_calls"] = calls
        if message.role == "tool":
            made["tool_call_id"] = waiting.answered(message)
        out.append(made)
    return out


def _content(text: str, images: list[str] | None) -> str | list[dict[str, object]]:
    """Return the content of a message: its text, or parts if it has images."""
    if not images:
        return text
    parts: list[dict[str, object]] = [{"type": "text", "text": text}] if text else []
    return parts + [{"type": "image_url", "image_url": {"url": _image_url(image)}} for image in images]


def _image_url(image: str) -> str:
    """Return a data URL for an image in base64. An engine must not be made to fetch a URL."""
    if _DATA_URL.match(image):
        return image
    if ":" in image[:16] or not image:
        raise invalid_request("images must be in base64, not URLs", param="images")
    kind = next((kind for begin, kind in _IMAGE_TYPES if image.startswith(begin)), "jpeg")
    return f"data:image/{kind};base64,{image}"


def refuse_management(advice: str) -> CallError:
    """Return the 400 for a request that manages models, with the way to do it here."""
    return invalid_request(f"this server does not manage models through Ollama's API: {advice}")
