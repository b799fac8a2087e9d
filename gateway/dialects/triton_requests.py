"""Translates requests of OpenAI's API to Triton's, for models of a Triton without an OpenAI front end. Pure.

Chats and completions become a prompt for `generate` or `generate_stream`, embeddings a tensor for `infer`. The names of
the inputs depend on the backend of the model (`TritonEntry`). Members whose meaning would be lost are rejected by name,
and others that are unknown are ignored: Triton would take them for inputs of the model. The docs page triton-api.md
lists all members.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from autoscaler.contract import ChatTemplate, TritonEntry
from gateway.dialects.translated_request import (
    MESSAGES_MAX,
    UNREADABLE,
    check_count,
    check_items,
    plain_json,
    unreadable_body,
)
from gateway.dialects.triton_structs import ChatBody, ChatMessage, CompletionBody, EmbeddingBody, Sampling
from gateway.errors import CallError, invalid_request, unsupported_dialect
from gateway.request.api_routes import CHAT, INFER, Kind, Operation

CHAT_TOKENS: Final = 1024
"""The maximum number of generated tokens of a chat that sets none. Backends have no default, or one of 16."""
COMPLETION_TOKENS: Final = 16
"""The same of a completion; OpenAI's default."""
INPUTS_MAX: Final = 2048
"""Texts of a request for embeddings, as in OpenAI's API."""
COMPLETION_PATH: Final = INFER[b"completions"].engine_path
EMBEDDING_PATH: Final = INFER[b"embeddings"].engine_path
PATHS: Final = frozenset({CHAT.engine_path, COMPLETION_PATH, EMBEDDING_PATH})
"""The paths of OpenAI's API that are translated."""
_NUMBERS: Final = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_REPORTS: Final = {
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_finish_reason": True,
}
"""Inputs of several backends, which request outputs with the token counts and the reason of the end."""
_UNSUPPORTED: Final[dict[str, tuple[bytes, ...]]] = {
    **dict.fromkeys(("n", "best_of"), (b"null", b"1")),
    **dict.fromkeys(("tools", "functions"), (b"null", b"[]")),
    **dict.fromkeys(("tool_choice", "function_call"), (b"null", b'"none"', b'"auto"')),
    **dict.fromkeys(("logprobs", "use_beam_search"), (b"null", b"false")),
    "top_logprobs": (b"null", b"0"),
    "logit_bias": (b"null", b"{}"),
    "response_format": (b"null", b'{"type":"text"}'),
    "modalities": (b"null", b'["text"]'),
    "suffix": (b"null", b'""'),
    **dict.fromkeys(
        (
            "audio", "dimensions", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "prompt_logprobs",
            "structured_outputs", "web_search_options",
        ),
        (b"null",),
    ),
}  # fmt: skip
"""Members that cannot be translated, with the values, as JSON, that mean the same as no member."""
_SERVED_NAME: Final = re.compile(r"[A-Za-z0-9._:@+-]{1,512}")
"""A name that is one segment of a path. Triton does not decode percent-encoded names."""

_members = msgspec.json.Decoder(dict[str, Raw])
_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)
_embedding = msgspec.json.Decoder(EmbeddingBody)

Json = dict[str, object]


class TritonRequest:
    """A translated request. `target` is the operation of Triton, `body` the body for it."""

    __slots__ = ("body", "in_base64", "path", "stream", "target", "texts", "tokens_max", "wants_usage")

    def __init__(self, path: bytes, target: Operation, members: Json) -> None:
        self.path = path
        """The path of OpenAI's API."""
        self.target = target
        self.body = msgspec.json.encode(members)
        self.stream = False
        self.wants_usage = False
        """Whether a stream ends with the token counts."""
        self.tokens_max = 0
        """The maximum number of generated tokens; 0 for embeddings."""
        self.texts = 0
        """The number of texts of a request for embeddings."""
        self.in_base64 = False
        """Whether vectors are sent as base64 of 32-bit floating-point numbers."""


def translate_request(
    path: bytes, body: bytes, entry: TritonEntry, served_name: str, *, wants_usage: bool
) -> TritonRequest:
    """Translate the body of a request to one of PATHS. Raises CallError 400."""
    if not _SERVED_NAME.fullmatch(served_name):
        raise unsupported_dialect()
    model = b"/v2/models/" + served_name.encode()
    check_items(body)
    body = plain_json(body)
    try:
        _check_members(_members.decode(body))
        if path == EMBEDDING_PATH:
            return _translate_embedding(model, _embedding.decode(body), entry)
        if path == COMPLETION_PATH:
            completion = _completion.decode(body)
            made = _translate_text(path, model, completion, _only_prompt(completion), entry, COMPLETION_TOKENS)
        else:
            chat = _chat.decode(body)
            made = _translate_text(path, model, chat, _render(chat.messages, entry.chat_template), entry, CHAT_TOKENS)
    except UNREADABLE as error:
        raise unreadable_body(error) from None
    made.wants_usage = wants_usage
    return made


def _check_members(members: dict[str, Raw]) -> None:
    """Raise CallError 400 for a member that cannot be translated."""
    for name in sorted(_UNSUPPORTED.keys() & members):
        if msgspec.json.encode(msgspec.json.decode(members[name])) not in _UNSUPPORTED[name]:
            raise _unsupported(name)


def _unsupported(name: str) -> CallError:
    fix = "send 1" if name in {"n", "best_of"} else "remove it"
    return invalid_request(
        f"{name} is not supported, because the engine of this model, Triton, has no such input; {fix}", param=name
    )


def _translate_text(  # noqa: PLR0917  two callers pass them in this order
    path: bytes, model: bytes, request: Sampling, prompt: str, entry: TritonEntry, tokens_default: int
) -> TritonRequest:
    """Translate a request for text. `tokens_default`: the maximum number of tokens if it sets none."""
    sampling = _sampling(request, tokens_default)
    streams = request.stream is True
    echoes = isinstance(request, CompletionBody) and request.echo is True
    if echoes and streams:
        raise invalid_request("echo is not supported in streams; remove it, or send stream: false", param="echo")
    members: Json = {"text_input": prompt, **_REPORTS}
    sampled = {**sampling, "stream": streams, "exclude_prompt": not echoes}
    for name, value in sampled.items():
        if name in entry.inputs:
            members[entry.inputs[name]] = value
        elif not entry.json_input:
            raise invalid_request(
                f"{name} is not supported, because the backend of this model has no such input; remove it", param=name
            )
    stops = sampling.get("stop")
    if isinstance(stops, list) and entry.one_stop:
        if len(stops) > 1:
            raise invalid_request(
                "stop may have one sequence only, because the backend of this model is not known; send one, or set "
                "spec.triton.backend of the Model",
                param="stop",
            )
        members[entry.inputs["stop"]] = stops[0]
    if entry.json_input:
        members[entry.json_input] = msgspec.json.encode(sampling).decode()
    made = TritonRequest(
        path, Operation(Kind.INFER, model + (b"/generate_stream" if streams else b"/generate")), members
    )
    made.stream = streams
    tokens_max = sampling["max_tokens"]
    made.tokens_max = tokens_max if isinstance(tokens_max, int) else tokens_default
    return made


def _sampling(request: Sampling, tokens_default: int) -> Json:
    """Return the sampling parameters that are set, with OpenAI's names, and always `max_tokens`."""
    sampling: Json = {}
    for name in _NUMBERS:
        value = getattr(request, name)
        if value is not None:
            sampling[name] = value
    if request.max_completion_tokens is not None:
        sampling["max_tokens"] = request.max_completion_tokens
    if sampling.setdefault("max_tokens", tokens_default) == 0:
        raise invalid_request("max_tokens must be at least 1", param="max_tokens")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if stops:
        sampling["stop"] = stops
    return sampling


def _only_prompt(request: CompletionBody) -> str:
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 1:
        raise invalid_request("prompt must be one text; send a request for each prompt", param="prompt")
    return prompt[0]


def _render(messages: list[ChatMessage], template: ChatTemplate | None) -> str:
    """Return the prompt for a chat."""
    check_count("messages", len(messages), MESSAGES_MAX)
    if not messages:
        raise invalid_request("messages must have at least one message", param="messages")
    turns = [(_role(message), _text(message)) for message in messages]
    if template is None:
        return msgspec.json.encode([{"role": role, "content": text} for role, text in turns]).decode()
    out: list[str] = []
    held: list[str] = []
    for role, text in turns:
        held.append(text)
        if role not in template.roles:  # system, which is put in front of the next message of the user
            continue
        frame = template.roles[role]
        if role == "user":
            out += [frame.before, "\n\n".join(held), frame.after]
            held.clear()
        else:
            out += [frame.before, held.pop(), frame.after]
    if held:
        frame = template.roles["user"]
        out += [frame.before, "\n\n".join(held), frame.after]
    return "".join(out) + template.answer


def _role(message: ChatMessage) -> str:
    role = message.role
    if message.tool_calls or role in {"tool", "function"}:
        raise invalid_request(
            "tool calls and their results are not supported by the engine of this model, Triton; remove these messages",
            param="messages",
        )
    if role == "developer":
        return "system"
    if role not in {"system", "user", "assistant"}:
        raise invalid_request("the role of a message must be system, user or assistant", param="messages")
    return role


def _text(message: ChatMessage) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type != "text" for part in content):
        raise invalid_request(
            "content may have parts of the type text only, because the engine of this model, Triton, gets one prompt; "
            "remove images, audio and files",
            param="messages",
        )
    return "\n".join([part.text or "" for part in content])


def _translate_embedding(model: bytes, request: EmbeddingBody, entry: TritonEntry) -> TritonRequest:
    if request.stream:
        raise invalid_request("stream is not supported for embeddings; remove it", param="stream")
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not 0 < len(texts) <= INPUTS_MAX:
        raise invalid_request(f"input must have 1 to {INPUTS_MAX:,} texts", param="input")
    if request.encoding_format not in {None, "float", "base64"}:
        raise invalid_request("encoding_format must be float or base64", param="encoding_format")
    tensor: Json = {"name": entry.embedding_input, "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}
    made = TritonRequest(EMBEDDING_PATH, Operation(Kind.INFER, model + b"/infer"), {"inputs": [tensor]})
    made.texts = len(texts)
    made.in_base64 = request.encoding_format == "base64"
    return made
