"""Translates requests of Anthropic's Messages API to OpenAI's chat completions, for engines without that API. Pure.

Members that are unknown here are passed to the engine unchanged, as on other paths. Members whose meaning would be lost
are rejected by name. The docs page anthropic-api.md lists all members.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from gateway.dialects.messages_structs import (
    Block,
    MessagesRequest,
    OutputConfig,
    OutputFormat,
    Source,
    Thinking,
    Tool,
    ToolChoice,
    Turn,
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
    join_parts,
    plain_json,
    unreadable_body,
)
from gateway.errors import CallError, invalid_request
from gateway.request.api_routes import CHAT
from gateway.request.forbidden_fields import check_case

_TRANSLATED: Final = frozenset(MessagesRequest.__struct_fields__)
_IGNORED: Final = frozenset(
    {
        "billing_policy", "cache_control", "context_management", "diagnostics", "fallback_credit_token", "fallbacks",
        "inference_geo", "service_tier", "speed",
    }
)  # fmt: skip
"""They affect how Anthropic processes a request, but not what the request means."""
_REJECTED: Final = frozenset({"compaction", "container", "mcp_servers", "thread"})
"""They need state or tools of Anthropic's servers."""
_KNOWN: Final = _TRANSLATED | _IGNORED | _REJECTED
_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_THINKING: Final = {"enabled": True, "adaptive": True, "disabled": False}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_MEDIA_TYPE = re.compile(r"image/[a-z0-9.+-]{1,32}")

_members = msgspec.json.Decoder(dict[str, Raw])
_request = msgspec.json.Decoder(MessagesRequest)
_result = msgspec.json.Decoder(str | list[Block])

Json = dict[str, object]


class TranslatedMessages(TranslatedRequest):
    """A translated request of the Messages API."""

    __slots__ = ("stop_sequences",)

    def __init__(self, request: MessagesRequest, members: Json) -> None:
        super().__init__(request.model or "", request.stream is True, CHAT, members)
        self.stop_sequences = frozenset(request.stop_sequences or ())


def translate_messages(body: bytes) -> TranslatedMessages:
    """Translate the body of a request. Raises CallError 400."""
    check_items(body)
    body = plain_json(body)
    try:
        given = _members.decode(body)
        check_case(given, _KNOWN)
        for name in sorted(_REJECTED.intersection(given)):
            if bytes(given[name]) not in {b"null", b"[]"}:
                raise _unsupported(name, name)
        request = _request.decode(body)
        members: Json = {name: value for name, value in given.items() if name not in _KNOWN}
        members |= _translate(request)
        return TranslatedMessages(request, members)
    except UNREADABLE as error:
        raise unreadable_body(error) from None


def _unsupported(what: str, param: str) -> CallError:
    return invalid_request(
        f"{what} is not supported: the engine of this model has only chat completions; remove it", param=param
    )


def _translate(request: MessagesRequest) -> Json:
    check_count("messages", len(request.messages), MESSAGES_MAX)
    check_count("tools", len(request.tools or ()), TOOLS_MAX)
    if request.max_tokens < 1:
        raise invalid_request("max_tokens must be at least 1", param="max_tokens")
    messages = _Messages()
    if request.system:
        messages.add_system(request.system)
    for turn in _combine(request.messages):
        messages.add(turn)
    check_count("images", messages.images, IMAGES_MAX)
    check_count("tool_calls", messages.calls, CALLS_MAX)
    members: Json = {"messages": messages.out, "max_tokens": request.max_tokens}
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(request, name)
        if value is not None:
            members[name] = value
    if request.stream:
        members["stream"] = True
    if request.stop_sequences:
        members["stop"] = request.stop_sequences
    if request.metadata is not None and request.metadata.user_id:
        members["user"] = request.metadata.user_id
    _add_tools(members, request.tools or [], request.tool_choice)
    _add_output(members, request.output_config, request.output_format)
    if request.thinking is not None:
        members["chat_template_kwargs"] = {"enable_thinking": _thinks(request.thinking)}
    return members


def _combine(turns: list[Turn]) -> list[Turn]:
    """Combine consecutive messages of one role, as Anthropic does. Many models require alternating roles."""
    out: list[Turn] = []
    for turn in turns:
        if out and out[-1].role == turn.role:
            content = out[-1].content = _blocks(out[-1].content)
            content += _blocks(turn.content)
        else:
            out.append(turn)
    return out


def _blocks(content: str | list[Block]) -> list[Block]:
    return [Block("text", content)] if isinstance(content, str) else content


def _add_tools(members: Json, tools: list[Tool], choice: ToolChoice | None) -> None:
    if tools:
        members["tools"] = [_tool(tool) for tool in tools]
    if choice is None:
        return
    if choice.type == "tool" and choice.name:
        chosen: object = {"type": "function", "function": {"name": choice.name}}
    elif choice.type in _CHOICES:
        chosen = _CHOICES[choice.type]
    else:
        raise invalid_request(
            "tool_choice.type must be auto, any, none, or tool together with a name", param="tool_choice"
        )
    if tools:
        members["tool_choice"] = chosen
        if choice.disable_parallel_tool_use is not None:
            members["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    elif choice.type not in {"auto", "none"}:  # these have no effect; engines reject any choice without tools
        raise invalid_request("tool_choice requires tools", param="tool_choice")


def _tool(tool: Tool) -> Json:
    if tool.type not in {None, "custom"}:
        raise invalid_request(
            "a tool of tools has a type other than custom, which only Anthropic runs or defines; define it with "
            "input_schema and without type",
            param="tools",
        )
    if not bytes(tool.input_schema).startswith(b"{"):
        raise invalid_request("the input_schema of a tool must be an object", param="tools")
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _add_output(members: Json, config: OutputConfig | None, older: OutputFormat | None) -> None:
    form = older if config is None or config.format is None else config.format
    if form is not None:
        if form.type != "json_schema" or not bytes(form.schema).startswith(b"{"):
            raise invalid_request(
                "output_config.format must have the type json_schema and an object schema", param="output_config"
            )
        schema: Json = {"name": "output", "schema": form.schema}
        members["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config is not None and config.effort is not None:
        effort = _EFFORTS.get(config.effort)
        if effort is None:
            raise invalid_request("output_config.effort must be low, medium, high, xhigh or max", param="output_config")
        members["reasoning_effort"] = effort


def _thinks(thinking: Thinking) -> bool:
    found = _THINKING.get(thinking.type)
    if found is None:
        raise invalid_request("thinking.type must be enabled, adaptive or disabled", param="thinking")
    return found


class _Messages:
    """The translated messages so far."""

    __slots__ = ("calls", "images", "out")

    def __init__(self) -> None:
        self.out: list[Json] = []
        self.images = 0
        self.calls = 0

    def add_system(self, system: str | list[Block]) -> None:
        """Add the system prompt, which Messages has outside of the messages."""
        self.out.append({"role": "system", "content": self._texts(system, "system")})

    def add(self, turn: Turn) -> None:
        """Add one message. Results of tools become messages of their own, before the rest of the message."""
        if turn.role == "user":
            self._add_user(turn.content)
        elif turn.role == "assistant":
            self._add_assistant(turn.content)
        elif turn.role == "system":
            self.add_system(turn.content)
        else:
            raise invalid_request("the role of a message must be user, assistant or system", param="messages")

    def _add_user(self, content: str | list[Block]) -> None:
        if isinstance(content, str):
            self.out.append({"role": "user", "content": content})
            return
        parts: list[Json] = []
        for block in content:
            if block.type == "tool_result":
                self._add_result(block, parts)
            else:
                parts.append(self._part(block))
        if parts or not content:
            self.out.append({"role": "user", "content": join_parts(parts)})

    def _add_result(self, block: Block, parts: list[Json]) -> None:
        """Add the result of a tool. Its images go to the message of the user, because engines accept only text here."""
        if not block.tool_use_id:
            raise invalid_request("a tool_result block must have a tool_use_id", param="messages")
        texts: list[Json] = []
        raw = bytes(block.content)
        content = "" if raw in {b"", b"null"} else _result.decode(raw)
        for part in map(self._part, _blocks(content)):
            (texts if part["type"] == "text" else parts).append(part)
        self.out.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": join_parts(texts)})

    def _add_assistant(self, content: str | list[Block]) -> None:
        if isinstance(content, str):
            self.out.append({"role": "assistant", "content": content})
            return
        parts: list[Json] = []
        calls: list[Json] = []
        thoughts: list[str] = []
        for block in content:
            if block.type == "tool_use":
                calls.append(_call(block))
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type != "redacted_thinking":  # only Anthropic can read it
                parts.append(self._part(block))
        self.calls += len(calls)
        message: Json = {"role": "assistant", "content": join_parts(parts) if parts or not calls else None}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.out.append(message)

    def _part(self, block: Block) -> Json:
        if block.type == "text" and block.text is not None:
            return {"type": "text", "text": block.text}
        if block.type == "image" and block.source is not None:
            self.images += 1
            return {"type": "image_url", "image_url": {"url": _image_url(block.source)}}
        raise invalid_request(
            "content must be blocks of the type text, image, tool_use, tool_result or thinking with their members, "
            "each in a message of its role; the engine of this model has only chat completions",
            param="messages",
        )

    def _texts(self, content: str | list[Block], param: str) -> str | list[Json]:
        if isinstance(content, str):
            return content
        if any(block.type != "text" for block in content):
            raise invalid_request(f"{param} must be a text or blocks of the type text", param=param)
        return join_parts([self._part(block) for block in content])


def _call(block: Block) -> Json:
    arguments = bytes(block.input) or b"{}"
    if not block.id or not block.name or not arguments.startswith(b"{"):
        raise invalid_request("a tool_use block must have an id, a name and an object as input", param="messages")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments.decode()}}


def _image_url(source: Source) -> str:
    """Return the URL of an image. Like a URL in a chat completion, the gateway neither checks nor fetches it."""
    if source.type == "url" and source.url:
        return source.url
    if source.type == "base64" and source.data and _MEDIA_TYPE.fullmatch(source.media_type or ""):
        return f"data:{source.media_type};base64,{source.data}"
    raise invalid_request(
        "the source of an image must have the type base64, with media_type and data, or url, with url", param="messages"
    )
