"""Converts Triton's responses to those of OpenAI's API. Pure.

Each event of `generate_stream` has a piece of text. The reason of the end and the token counts are optional outputs of
a model. Without the reason, an answer with the maximum number of tokens counts as cut off. Without the counts, the
pieces of a stream are counted.
"""

from __future__ import annotations

import base64
import struct

import msgspec

from gateway.dialects.chat_responses import ChatConverter, error_text
from gateway.dialects.translated_request import ITEMS_MAX, UNREADABLE, count_items
from gateway.dialects.triton_requests import COMPLETION_PATH, EMBEDDING_PATH, Json, TritonRequest
from gateway.dialects.triton_structs import GenerateReply, InferReply, OutputTensor
from gateway.errors import CallError, render_error_body, render_error_event

NUMBERS_MAX = 1 << 21
"""Numbers of a response with embeddings. Each is decoded, which takes 32 bytes of memory."""

_generate = msgspec.json.Decoder(GenerateReply)
_infer = msgspec.json.Decoder(InferReply)
_numbers = msgspec.json.Decoder(list[float])
_FLOATS = ("FP32", "FP64", "FP16", "BF16")
_ERROR_STATUS = 500
"""The status of an error in a response with status 200: a model sent several responses to `generate`."""


class TritonConverter(ChatConverter):
    """Converts one response. `model`: its name as the client knows it. `id`: the id of the request."""

    __slots__ = ("_base", "_begun", "_is_chat", "_pieces", "_request", "_tokens_in", "_tokens_out")

    def __init__(self, request: TritonRequest, model: str, id: str, created_unix_s: int) -> None:
        super().__init__(stream=request.stream)
        self._request = request
        self._is_chat = request.path != COMPLETION_PATH
        prefix, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        if self._is_chat and request.stream:
            kind += ".chunk"
        self._base: Json = {"id": f"{prefix}-{id}", "object": kind, "created": created_unix_s, "model": model}
        self._begun = False
        self._pieces = 0
        self._tokens_in = -1
        """Tokens of the prompt; -1 if the model does not report them."""
        self._tokens_out = -1

    def token_counts(self) -> bytes:
        """See ChatConverter."""
        return b'"usage":' + msgspec.json.encode(self._counts())

    # --- streams -----------------------------------------------------------------------------------------------------

    def _payload(self, payload: bytes) -> bytes:
        try:
            found = _generate.decode(payload)
        except UNREADABLE:
            self.broken = True
            return b""
        if found.error is not None:
            self.ended = True
            return render_error_event(_engine_error(_ERROR_STATUS, found.error))
        text = self._read(found)
        return self._begin() + (self._chunk({"content": text}, None) if text else b"")

    def _read(self, found: GenerateReply) -> str:
        """Return the text of a response, and note its other outputs."""
        text = _text_of(found.text_output) or ""
        self._pieces += bool(text)
        reason = _text_of(found.finish_reason)
        if reason in {"stop", "length"}:
            self._finish_reason = reason or ""
        tokens_in, tokens_out = _number_of(found.num_input_tokens), _number_of(found.num_output_tokens)
        if tokens_in is not None:
            self._tokens_in = max(0, tokens_in)
        if tokens_out is not None:  # of this response
            self._tokens_out = max(0, self._tokens_out) + max(0, tokens_out)
        return text

    def _begin(self) -> bytes:
        """Return the first chunk of a chat, once."""
        if self._begun:
            return b""
        self._begun = True
        return self._chunk({"role": "assistant", "content": ""}, None) if self._is_chat else b""

    def _chunk(self, delta: Json, finish_reason: str | None) -> bytes:
        return _event({**self._base, "choices": [self._choice_of(delta, "delta", finish_reason)]})

    def _choice_of(self, delta: Json, name: str, finish_reason: str | None) -> Json:
        """Return a choice with a message, or a part of one, called `name`."""
        content: Json = {name: delta} if self._is_chat else {"text": delta.get("content", "")}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _end(self) -> bytes:
        self.ended = True
        out = self._begin() + self._chunk({}, self._reason())
        if self._request.wants_usage:
            out += _event({**self._base, "choices": [], "usage": self._counts()})
        return out + b"data: [DONE]\n\n"

    def _reason(self) -> str:
        is_cut = self._tokens_out >= self._request.tokens_max
        return self._finish_reason or ("length" if is_cut else "stop")

    def _counts(self) -> Json:
        """Return the token counts. Without those of the model, each piece of a stream counts as a token."""
        tokens_in = max(0, self._tokens_in)
        tokens_out = self._tokens_out if self._tokens_out >= 0 else self._pieces * self.stream
        return {
            "prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out,
        }  # fmt: skip

    # --- documents ---------------------------------------------------------------------------------------------------

    def convert(self, status: int, body: bytes, *, late: bool = False) -> bytes:
        """Return the document for a whole response, or its events if a stream was requested; empty and `broken` if it
        is unusable.
        """
        if status >= 400:  # the error of a stream is an event
            return self._fail(status, error_text(body.removeprefix(b"data: ")), late=late)
        is_embedding = self._request.path == EMBEDDING_PATH
        if body.count(b",") >= NUMBERS_MAX if is_embedding else count_items(body) > ITEMS_MAX:
            self.broken = True
            return b""
        try:
            if is_embedding:
                return self._embeddings(_infer.decode(body), late=late)
            found = _generate.decode(body)
        except UNREADABLE:
            self.broken = True
            return b""
        if found.error is not None:
            self.status = _ERROR_STATUS
            return self._fail(_ERROR_STATUS, found.error, late=late)
        if found.text_output is None:
            self.broken = True
            return b""
        if self.stream:
            return self._payload(body) + self._end()
        message: Json = {"role": "assistant", "content": self._read(found)}
        document = {**self._base, "choices": [self._choice_of(message, "message", self._reason())]}
        if self._tokens_in >= 0 and self._tokens_out >= 0:
            document["usage"] = self._counts()
        return msgspec.json.encode(document)

    def _fail(self, status: int, message: str, *, late: bool) -> bytes:
        error = _engine_error(status, message)
        return render_error_event(error) if late else render_error_body(error)

    def _embeddings(self, found: InferReply, *, late: bool) -> bytes:
        """Convert the first output that has a vector for each text. Raises an exception of UNREADABLE."""
        if found.error is not None:
            self.status = _ERROR_STATUS
            return self._fail(_ERROR_STATUS, found.error, late=late)
        tensor = next(filter(_has_vectors, found.outputs or ()), None)
        vectors = [] if tensor is None else self._vectors(tensor)
        if not vectors:
            self.broken = True
            return b""
        data = [
            {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
        ]  # fmt: skip
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return msgspec.json.encode({"object": "list", "data": data, "model": self._base["model"], "usage": usage})

    def _vectors(self, tensor: OutputTensor) -> list[object]:
        """Return the vectors of a tensor; none if it has another number of elements than its shape."""
        rows, length = tensor.shape[0], tensor.shape[-1]
        numbers = _numbers.decode(tensor.data)
        if rows != self._request.texts or len(numbers) != rows * length:
            return []
        vectors = [numbers[at : at + length] for at in range(0, len(numbers), length)]
        if not self._request.in_base64:
            return [*vectors]
        try:
            return [base64.b64encode(struct.pack(f"<{length}f", *vector)).decode() for vector in vectors]
        except OverflowError:  # a number of the type FP64
            return []


def _has_vectors(tensor: OutputTensor) -> bool:
    """Return whether a tensor has one vector for each text: N x D, or N x 1 x D."""
    shape = tensor.shape
    is_flat = len(shape) == 2 or (len(shape) == 3 and shape[1] == 1)
    return tensor.datatype in _FLOATS and is_flat and min(shape) > 0


def _text_of(value: list[str] | str | None) -> str | None:
    return (value[0] if value else None) if isinstance(value, list) else value


def _number_of(value: list[int] | int | None) -> int | None:
    return (value[0] if value else None) if isinstance(value, list) else value


def _event(members: Json) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(members)


def _engine_error(status: int, message: str) -> CallError:
    """Return the error for a message of Triton."""
    return CallError(status, "invalid_request" if status == 400 else "upstream_error", message)
