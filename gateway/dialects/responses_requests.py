"""Translates requests of OpenAI's Responses API to chat completions, for engines without that API. Pure.

Members that are unknown here are passed to the engine unchanged, as on other paths. Members whose meaning would be lost
are rejected by name. The docs page responses-api.md lists all members.

No engine keeps the state of responses: a stored response would be known to one replica only, until it stops, and to
every Tenant that knows its id. `check_stateless` therefore applies to all engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from gateway.dialects.responses_structs import (
    FunctionChoice,
    FunctionTool,
    Item,
    Part,
    ResponsesRequest,
    TextFormat,
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

_SEND_ALL: Final = "send the whole conversation in input"
STATE: Final = {
    "previous_response_id": f"responses are not stored: remove it, and {_SEND_ALL}",
    "conversation": f"conversations are not stored: remove it, and {_SEND_ALL}",
    "store": "responses are not stored: set it to false, or remove it",
    "background": "responses are not stored: set it to false, and wait for the response or stream it",
}
"""Members that need stored responses, and what to do instead."""
_TRANSLATED: Final = frozenset(ResponsesRequest.__struct_fields__)
ECHO_BYTES_MAX = 64 << 10
"""A response repeats only members up to this size, because they are kept until the response is complete."""
_ECHOED: Final = ("instructions", "max_output_tokens", "metadata", "reasoning", "temperature", "text", "top_p", "user")
"""Members that a response repeats, null if the request lacks them."""
_IGNORED: Final = frozenset(
    {
        "access_programs", "client_metadata", "image", "max_tool_calls", "metadata", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "stream_options",
    }
)  # fmt: skip
"""They affect how OpenAI processes a request, but not what the request means."""
_REJECTED: Final = frozenset({"context_management", "moderation", "prompt"})
"""They need state or models of OpenAI's servers."""
_KNOWN: Final = _TRANSLATED | _IGNORED | _REJECTED | frozenset(STATE)
_EMPTY: Final = frozenset({b"", b"null", b"false"})
_EFFORTS: Final = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
_CHOICES: Final = frozenset({"auto", "none", "required"})
_LOGPROBS: Final = "message.output_text.logprobs"
_HOSTED: Final = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search",
        "image_generation", "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search",
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    }
)  # fmt: skip
"""Types of tools that an error names; of other types it does not repeat the client's value."""
_SYSTEM: Final = {"system": "system", "developer": "system"}

_members = msgspec.json.Decoder(dict[str, Raw])
_request = msgspec.json.Decoder(ResponsesRequest)

Json = dict[str, object]


class TranslatedResponses(TranslatedRequest):
    """A translated request of the Responses API. `echo`: the members that the response repeats."""

    __slots__ = ("echo",)

    def __init__(self, request: ResponsesRequest, given: dict[str, Raw], members: Json) -> None:
        super().__init__(request.model or "", request.stream is True, CHAT, members)
        kept = {name: Raw(bytes(value)) for name, value in given.items() if len(bytes(value)) <= ECHO_BYTES_MAX}
        self.echo: Json = {name: kept.get(name) for name in _ECHOED}
        self.echo["tools"] = kept.get("tools", []) if request.tools else []
        self.echo["tool_choice"] = "auto" if request.tool_choice is None else kept.get("tool_choice", "auto")
        self.echo["parallel_tool_calls"] = request.parallel_tool_calls is not False
        self.echo["truncation"] = "disabled"
        if request.text is None or request.text.format is None:
            self.echo["text"] = {"format": {"type": "text"}}


def check_stateless(members: Mapping[str, Raw]) -> None:
    """Raise CallError 400 for a request that needs stored responses. `members` has at least those that select them; a
    value that is too long to be read is empty.
    """
    for name, fix in STATE.items():
        if name in members and (bytes(members[name]) or b"long") not in _EMPTY:
            raise invalid_request(f"{name} is not supported: {fix}", param=name)


def translate_responses(body: bytes) -> TranslatedResponses:
    """Translate the body of a request. Raises CallError 400."""
    check_items(body)
    body = plain_json(body)
    try:
        given = _members.decode(body)
        check_case(given, _KNOWN)
        check_stateless(given)
        for name in sorted(_REJECTED.intersection(given)):
            if bytes(given[name]) not in {b"null", b"[]"}:
                raise _unsupported(name, name)
        request = _request.decode(body)
        members: Json = {name: value for name, value in given.items() if name not in _KNOWN}
        members |= _translate(request)
        return TranslatedResponses(request, given, members)
    except UNREADABLE as error:
        raise unreadable_body(error) from None


def _unsupported(what: str, param: str, fix: str = "remove it") -> CallError:
    return invalid_request(
        f"{what} is not supported: the engine of this model has only chat completions; {fix}", param=param
    )


def _translate(request: ResponsesRequest) -> Json:
    check_count("tools", len(request.tools or ()), TOOLS_MAX)
    if request.truncation not in {None, "disabled"}:
        raise _unsupported("truncation other than disabled", "truncation", "shorten the input")
    messages = _Messages()
    if request.instructions:
        messages.add_system(request.instructions)
    if isinstance(request.input, str):
        messages.out.append({"role": "user", "content": request.input})
    else:
        check_count("input", len(request.input), MESSAGES_MAX)
        for item in request.input:
            messages.add(item)
        messages.add_images()
    check_count("images", messages.images, IMAGES_MAX)
    check_count("tool_calls", messages.calls, CALLS_MAX)
    members: Json = {"messages": messages.out}
    if request.max_output_tokens is not None:
        if request.max_output_tokens < 1:
            raise invalid_request("max_output_tokens must be at least 1", param="max_output_tokens")
        members["max_tokens"] = request.max_output_tokens
    for name in ("temperature", "top_p"):
        value = getattr(request, name)
        if value is not None:
            members[name] = value
    if request.stream:
        members["stream"] = True
    _add_tools(members, request)
    _add_output(members, request)
    return members


def _add_tools(members: Json, request: ResponsesRequest) -> None:
    tools, choice = request.tools or [], request.tool_choice
    chosen: object = choice
    if isinstance(choice, FunctionChoice):
        if choice.type == "allowed_tools" and choice.tools is not None and choice.mode in {"auto", "required"}:
            allowed = {tool.name for tool in choice.tools if tool.type == "function"}
            tools = [tool for tool in tools if tool.name in allowed]
            chosen = choice.mode
        elif choice.type == "function" and choice.name:
            chosen = {"type": "function", "function": {"name": choice.name}}
        else:
            raise _bad_choice()
    elif choice is not None and choice not in _CHOICES:
        raise _bad_choice()
    if tools:
        members["tools"] = [_tool(tool) for tool in tools]
        if chosen is not None:
            members["tool_choice"] = chosen
        if request.parallel_tool_calls is not None:
            members["parallel_tool_calls"] = request.parallel_tool_calls
    elif chosen not in {None, "auto", "none"} if isinstance(chosen, str) else chosen is not None:
        raise invalid_request("tool_choice requires tools", param="tool_choice")


def _bad_choice() -> CallError:
    return invalid_request(
        "tool_choice must be auto, none, required, a function with its name, or allowed_tools with the mode auto or "
        "required and functions",
        param="tool_choice",
    )


def _tool(tool: FunctionTool) -> Json:
    if tool.type != "function":
        what = f"the tool {tool.type}" if tool.type in _HOSTED else "a tool with a type other than function"
        raise _unsupported(what, "tools", "define a tool of the type function, and run it in the client")
    parameters = bytes(tool.parameters)
    if not tool.name or not (parameters in _EMPTY or parameters.startswith(b"{")):
        raise invalid_request("a tool must have a name, and an object as parameters", param="tools")
    function: Json = {"name": tool.name}
    if parameters not in _EMPTY:
        function["parameters"] = tool.parameters
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _add_output(members: Json, request: ResponsesRequest) -> None:
    text, reasoning = request.text, request.reasoning
    if text is not None and text.format is not None and text.format.type != "text":
        members["response_format"] = _response_format(text.format)
    if text is not None and text.verbosity is not None:
        members["verbosity"] = text.verbosity
    if reasoning is not None and reasoning.effort is not None:
        if reasoning.effort == "none":
            members["chat_template_kwargs"] = {"enable_thinking": False}
        elif (effort := _EFFORTS.get(reasoning.effort)) is not None:
            members["reasoning_effort"] = effort
        else:
            raise invalid_request(
                "reasoning.effort must be none, minimal, low, medium, high, xhigh or max", param="reasoning"
            )
    if request.top_logprobs is not None:
        members["top_logprobs"] = request.top_logprobs
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        members["logprobs"] = True


def _response_format(form: TextFormat) -> Json:
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.type != "json_schema" or not bytes(form.schema).startswith(b"{"):
        raise invalid_request(
            "text.format must have the type text, json_object, or json_schema with a name and an object schema",
            param="text",
        )
    schema: Json = {"name": form.name or "output", "schema": form.schema}
    if form.description is not None:
        schema["description"] = form.description
    if form.strict is not None:
        schema["strict"] = form.strict
    return {"type": "json_schema", "json_schema": schema}


class _Messages:
    """The translated messages so far. Consecutive items of the assistant become one message."""

    __slots__ = ("_shown", "calls", "images", "out")

    def __init__(self) -> None:
        self.out: list[Json] = []
        self._shown: list[Json] = []
        """Images of results of functions. They follow the last result, because engines accept only text in results."""
        self.images = 0
        self.calls = 0

    def add_system(self, content: str | list[Part]) -> None:
        """Add a message of the system or the developer. Those at the beginning become one message, because many
        templates accept no second one.
        """
        texts = [content] if isinstance(content, str) else [str(self._part(part)["text"]) for part in content]
        first = self.out[0] if len(self.out) == 1 and self.out[0]["role"] == "system" else None
        if first is None:
            self.out.append({"role": "system", "content": "\n\n".join(texts)})
        else:
            first["content"] = "\n\n".join([str(first["content"]), *texts])

    def add(self, item: Item) -> None:
        """Add one item. Raises CallError 400."""
        if item.type != "function_call_output":
            self.add_images()
        if item.type == "message" or (item.type is None and item.role is not None):
            self._add_message(item)
        elif item.type == "function_call":
            self._add_call(item)
        elif item.type == "function_call_output":
            self._add_output(item)
        elif item.type == "reasoning":
            self._add_reasoning(item)
        elif item.type == "item_reference":
            raise invalid_request(
                f"item_reference is not supported: responses are not stored; {_SEND_ALL}", param="input"
            )
        else:
            raise _bad_item()

    def _add_message(self, item: Item) -> None:
        content = item.content
        if content is None:
            raise _bad_item()
        if item.role in _SYSTEM:
            if not isinstance(content, str) and any(part.type != "input_text" for part in content):
                raise invalid_request("a message of the system or developer must be text", param="input")
            self.add_system(content)
        elif item.role == "assistant":
            self._assistant(has_content=True)["content"] = self._content(content)
        elif item.role == "user":
            self.out.append({"role": "user", "content": self._content(content)})
        else:
            raise invalid_request("the role of a message must be user, assistant, system or developer", param="input")

    def _content(self, content: str | list[Part]) -> str | list[Json]:
        return content if isinstance(content, str) else join_parts([self._part(part) for part in content])

    def _assistant(self, *, has_content: bool) -> Json:
        """Return the message of the assistant to which the next item belongs. Its order is reasoning, text, calls."""
        if self.out and self.out[-1]["role"] == "assistant":
            last = self.out[-1]
            if not has_content or (last["content"] is None and "tool_calls" not in last):
                return last
        self.out.append({"role": "assistant", "content": None})
        return self.out[-1]

    def _add_call(self, item: Item) -> None:
        if not item.call_id or not item.name or item.arguments is None:
            raise invalid_request("a function_call must have a call_id, a name and arguments", param="input")
        if item.namespace:
            raise _unsupported("the namespace of a function_call", "input")
        self.calls += 1
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        calls = self._assistant(has_content=False).setdefault("tool_calls", [])
        if isinstance(calls, list):
            calls.append({"id": item.call_id, "type": "function", "function": function})

    def _add_output(self, item: Item) -> None:
        output = item.output
        if not item.call_id or output is None:
            raise invalid_request("a function_call_output must have a call_id and an output", param="input")
        texts: list[Json] = []
        for part in [Part("input_text", output)] if isinstance(output, str) else output:
            found = self._part(part)
            (texts if found["type"] == "text" else self._shown).append(found)
        self.out.append({"role": "tool", "tool_call_id": item.call_id, "content": join_parts(texts)})

    def add_images(self) -> None:
        """Add a message of the user with the images of the last results, if any."""
        if self._shown:
            self.out.append({"role": "user", "content": self._shown})
            self._shown = []

    def _add_reasoning(self, item: Item) -> None:
        """Add reasoning. Encrypted content is ignored: only OpenAI can read it."""
        content = item.content
        parts = content if isinstance(content, list) and content else item.summary or []
        text = content if isinstance(content, str) else "".join([part.text or "" for part in parts])
        if text:
            message = self._assistant(has_content=True)
            message["reasoning_content"] = f"{message.get('reasoning_content', '')}{text}"

    def _part(self, part: Part) -> Json:
        if part.type in {"input_text", "output_text", "text"} and part.text is not None:
            return {"type": "text", "text": part.text}
        if part.type == "refusal" and part.refusal is not None:
            return {"type": "text", "text": part.refusal}
        if part.type == "input_image" and part.image_url:
            self.images += 1
            image: Json = {"url": part.image_url}
            if part.detail in {"auto", "low", "high"}:
                image["detail"] = part.detail
            return {"type": "image_url", "image_url": image}
        raise _bad_item()


def _bad_item() -> CallError:
    return invalid_request(
        "input must be text or items of the type message, function_call, function_call_output or reasoning, with parts "
        "of the type input_text, output_text, refusal or input_image with an image_url; the engine of this model has "
        "only chat completions",
        param="input",
    )
