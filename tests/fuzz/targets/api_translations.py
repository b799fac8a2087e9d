"""Fuzz target for requests and responses that are translated between OpenAI's API and those of Ollama and Anthropic."""

from __future__ import annotations

import json

from gateway.dialects.chat_responses import ChatConverter
from gateway.dialects.messages_requests import translate_messages
from gateway.dialects.messages_responses import MessagesConverter
from gateway.dialects.ollama_requests import translate_request
from gateway.dialects.ollama_responses import ReplyConverter
from gateway.dialects.translated_request import TranslatedRequest
from gateway.errors import CallError
from gateway.request import body_members
from gateway.request.api_routes import find_operation

OLLAMA = tuple(
    operation
    for path in (b"/api/chat", b"/api/generate", b"/api/embed", b"/api/embeddings")
    if (operation := find_operation(b"POST", path)) is not None
)
REQUESTS = (
    b'{"model":"m","messages":[{"role":"user","content":"a","images":["iVBORw"]}],"tools":[{}],"think":"low"}',
    b'{"model":"m","prompt":"a","suffix":"b","options":{"stop":["x"],"num_predict":5},"format":{},"keep_alive":"5m"}',
    b'{"model":"m","input":["a"],"dimensions":3,"prompt":"b","stream":false}',
    (
        b'{"model":"m","max_tokens":9,"system":[{"type":"text","text":"a"}],"messages":[{"role":"user","content":[{"type":'
        b'"text","text":"a"},{"type":"image","source":{"type":"url","url":"u"}},{"type":"tool_result","tool_use_id":"i",'
        b'"content":[{"type":"text","text":"\\ud83d\\ude00"}]}]},{"role":"assistant","content":[{"type":"tool_use","id":"i"'
        b',"name":"f","input":{"a":[1]}},{"type":"thinking","thinking":"h"}]}],"stop_sequences":["x"],"stream":true,'
        b'"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"any"},"thinking":{"type":"adaptive"},"min_p":1}'
    ),
)
CHUNKS = (
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":null,"reasoning_content":"h"}}]}',
    b'{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{}]},"finish_reason":null}]}',
    (
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"i","function":{"name":"f","arguments":"{\\"a\\""}}'
        b"]}}]}"
    ),
    (
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]},"finish_reason":'
        b'"tool_calls","stop_reason":"x"}]}'
    ),
    b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}',
    b'{"error":{"message":"no"}}',
    b"[DONE]",
)
STREAM = b"".join(b"data: %b\n\n" % chunk for chunk in CHUNKS)
DOCUMENT = (
    b'{"choices":[{"message":{"content":"a","reasoning":"h","tool_calls":[{"id":"i","function":{"name":"f","arguments":'
    b'"{}"}}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":2},"data":[{"embedding":[1,2]}]}'
)
SEEDS = tuple(bytes((number,)) + one for number in range(10) for one in (*REQUESTS, STREAM, DOCUMENT))
WORDS = (
    *CHUNKS, b"data: ", b"\n\n", b"\r\n\r\n", b": c\n", b'"type":"', b'"index":', b'"content":', b'"arguments":',
    b'"error":', b'"choices":', b"null", b"true", b"[", b"]", b"{", b"}", b",", b'"', b"\\ud800", b"\xff", b"1e999",
)  # fmt: skip


def translations(data: bytes) -> None:
    """Translate a request, or convert a response, by the first byte of the input."""
    number, body = data[0] % 10 if data else 0, data[1:]
    if number < 5:
        check_request(number, body)
    else:
        check_response(number, body)


def check_request(number: int, body: bytes) -> None:
    """Check that a request is rejected with 400, or translated to a body that the gateway can read and edit."""
    try:
        made: TranslatedRequest = translate_messages(body) if number == 4 else translate_request(OLLAMA[number], body)
        json.loads(made.body)
        peek = body_members.read_body(made.target, made.body, b"application/json", None, "default")
        assert peek.stream == made.stream
    except CallError as error:
        if error.status != 400:
            raise


def make_converter(number: int, *, stream: bool) -> ChatConverter:
    """Return a new converter for Ollama's chats or for Messages."""
    asked = json.dumps({"model": "m", "max_tokens": 9, "messages": [], "stream": stream, "stop_sequences": ["x"]})
    if number % 2:
        return MessagesConverter(translate_messages(asked.encode()), "m", "msg_1")
    return ReplyConverter(translate_request(OLLAMA[0], asked.encode()), "m", lambda: "now", dict)


def check_response(number: int, body: bytes) -> None:
    """Check that a response becomes valid JSON, or is broken; and that a stream may arrive in any pieces."""
    stream = number < 7
    whole = make_converter(number, stream=stream).convert(200, body)
    for line in whole.splitlines() if stream else [whole] if whole else []:
        if line and not line.startswith(b"event: "):
            json.loads(line.removeprefix(b"data: "))
    json.loads(make_converter(number, stream=stream).convert(500, body))
    one, two = make_converter(number, stream=True), make_converter(number, stream=True)
    expected = one.feed(body) + one.finish()
    half = len(body) // 2
    found = two.feed(body[:half])
    found += two.feed(body[half:]) + two.finish()
    if not one.broken:
        assert found == expected
    for line in expected.splitlines():
        if line and not line.startswith(b"event: "):
            json.loads(line.removeprefix(b"data: "))
