"""Tools, structured output, vectors in base64 and forms of the fake engine."""

from __future__ import annotations

import base64
import hashlib
import json
import struct

from loadtest.fake_engine.api_dialects import DIALECTS, Answer, Json, example_value, read_ask, tokens_of

SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def answer(path: str, body: bytes | Json, content_type: str = "application/json") -> Answer:
    ask = read_ask(body if isinstance(body, bytes) else json.dumps(body).encode(), content_type)
    return DIALECTS[path](ask, 1, *tokens_of("Hello there", 0, ask))


def test_fake_engine_returns_a_tool_call_until_a_tool_result_is_sent() -> None:
    body: Json = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]}
    whole = json.dumps(answer(CHAT, {**body, "messages": []}).document())
    assert r'"name": "weather", "arguments": "{\"city\": \"text\"}"' in whole
    assert '"finish_reason": "tool_calls"' in whole
    assert "Hello there" in json.dumps(answer(CHAT, {**body, "messages": [{"role": "tool"}]}).document())

    body = {"tools": [{"name": "weather", "input_schema": SCHEMA}]}
    whole = json.dumps(answer(MESSAGES, {**body, "messages": []}).document())
    assert '"name": "weather", "input": {"city": "text"}' in whole
    assert '"stop_reason": "tool_use"' in whole
    result = [{"role": "user", "content": [{"type": "tool_result"}]}]
    assert "Hello there" in json.dumps(answer(MESSAGES, {**body, "messages": result}).document())


def test_streamed_tool_call_parts_concatenate_to_its_json_arguments() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    stream = answer(CHAT, {"tools": [tool], "messages": []})
    parts = [json.loads(stream.token(token).removeprefix(b"data: ")) for token in stream.tokens]
    calls = [part["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] for part in parts]
    assert (len(calls), json.loads("".join(calls))) == (2, {"city": "text"})
    assert b'"weather"' in stream.opening()


def test_request_with_a_json_schema_returns_a_value_that_matches_it() -> None:
    given: Json = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    assert answer(CHAT, given).tokens == ['{"city":', ' "text"}']
    assert answer(MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}).tokens
    nested: Json = {"$defs": {"A": SCHEMA}, "type": "array", "items": {"anyOf": [{"$ref": "#/$defs/A"}]}}
    assert example_value(nested, nested) == [{"city": "text"}]
    assert example_value({"enum": ["b", "a"]}, {}) == "b"


def test_embedding_is_base64_if_the_request_sets_encoding_format_base64() -> None:
    rows = answer("/v1/embeddings", {"input": ["one"], "encoding_format": "base64"}).document()["data"]
    assert isinstance(rows, list)
    assert struct.unpack("<4f", base64.b64decode(rows[0]["embedding"]))[1:] == (0.5, 0.25, 0.125)


def test_transcription_form_returns_the_sha256_digest_of_its_file() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nada\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\r\n\x01\r\n--b--\r\n'
    )
    whole = answer("/v1/audio/transcriptions", form, "multipart/form-data; boundary=b")
    assert whole.document() == {"text": hashlib.sha256(b"\x00\r\n\x01").hexdigest()}
    assert whole.ask.model == "ada"
