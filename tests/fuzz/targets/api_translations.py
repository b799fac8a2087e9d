"""Fuzz targets for requests and responses that are translated: between chat completions and other APIs, and rerank."""

from __future__ import annotations

import json

from autoscaler.spec.engines import TRITON_BACKENDS
from gateway.dialects.chat_responses import ChainedConverter, ChatConverter
from gateway.dialects.messages_requests import translate_messages
from gateway.dialects.messages_responses import MessagesConverter
from gateway.dialects.ollama_requests import translate_request
from gateway.dialects.ollama_responses import ReplyConverter
from gateway.dialects.rerank import RerankConverter, find_target, translate_rerank
from gateway.dialects.responses_requests import translate_responses
from gateway.dialects.responses_responses import ResponsesConverter
from gateway.dialects.translated_request import TranslatedRequest
from gateway.dialects.triton_requests import COMPLETION_PATH, EMBEDDING_PATH
from gateway.dialects.triton_requests import translate_request as translate_for_triton
from gateway.dialects.triton_responses import TritonConverter
from gateway.errors import CallError
from gateway.request import body_members
from gateway.request.api_routes import CHAT, RERANK_AND_TOKENIZE, find_operation

NUMBERS = 16
"""First bytes with different meanings."""
TRITON_PATHS = (CHAT.engine_path, COMPLETION_PATH, EMBEDDING_PATH)
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
TRITON_REQUESTS = (
    (
        b'{"model":"m","messages":[{"role":"system","content":"a"},{"role":"user","content":[{"type":"text","text":"b"}]}],'
        b'"stop":"x","temperature":1,"max_completion_tokens":5,"stream":true,"n":1,"tools":[]}'
    ),
    b'{"model":"m","prompt":["a"],"stop":["x"],"seed":7,"echo":true,"logit_bias":{},"response_format":{"type":"text"}}',
    b'{"model":"m","input":["a","b"],"encoding_format":"base64"}',
)
TRITON_CHUNKS = (
    b'{"model_name":"m","text_output":"a","finish_reason":"None","num_input_tokens":7,"num_output_tokens":[1]}',
    b'{"model_name":"m","text_output":["b"],"finish_reason":["length"],"num_output_tokens":4}',
    b'{"error":"no"}',
)
VECTORS = b'{"outputs":[{"name":"e","datatype":"FP32","shape":[2,2],"data":[1.0,2,3e0,-4]}],"text_output":"a"}'
STREAM = b"".join(b"data: %b\n\n" % chunk for chunk in CHUNKS)
TRITON_STREAM = b"".join(b"data: %b\n\n" % chunk for chunk in TRITON_CHUNKS)
DOCUMENT = (
    b'{"choices":[{"message":{"content":"a","reasoning":"h","tool_calls":[{"id":"i","function":{"name":"f","arguments":'
    b'"{}"}}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":2},"data":[{"embedding":[1,2]}]}'
)
SEEDS = (
    *(bytes((number,)) + one for number in range(10) for one in (*REQUESTS, STREAM, DOCUMENT)),
    *(bytes((number,)) + one for number in range(10, 13) for one in TRITON_REQUESTS),
    *(bytes((number,)) + one for number in range(13, NUMBERS) for one in (*TRITON_CHUNKS, TRITON_STREAM, VECTORS)),
)
WORDS = (
    *CHUNKS, *TRITON_CHUNKS, b"data: ", b"\n\n", b"\r\n\r\n", b": c\n", b'"type":"', b'"index":', b'"content":',
    b'"arguments":', b'"error":', b'"choices":', b"null", b"true", b"[", b"]", b"{", b"}", b",", b'"',
    b"\\ud800", b"\xff", b"1e999",
)  # fmt: skip


def translations(data: bytes) -> None:
    """Translate a request, or convert a response, by the first byte of the input."""
    number, body = data[0] % NUMBERS if data else 0, data[1:]
    if number < 5:
        check_request(number, body)
    elif 10 <= number < 13:
        check_triton_request(number - 10, body)
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


def check_triton_request(number: int, body: bytes) -> None:
    """Check that a request is rejected with 400 by every backend that does not get a JSON object for it."""
    for entry in TRITON_BACKENDS.values():
        try:
            made = translate_for_triton(TRITON_PATHS[number], body, entry, "m", wants_usage=False)
        except CallError as error:
            if error.status != 400:
                raise
            continue
        sent = json.loads(made.body)
        assert ("inputs" in sent) == (number == 2)
        assert made.target.engine_path.endswith(b"_stream") == made.stream


def make_converter(number: int, *, stream: bool) -> ChatConverter:
    """Return a new converter for Ollama's chats, for Messages, or from Triton's API."""
    asked = json.dumps({
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "input": ["a", "b"],
        "stream": stream, "stop_sequences": ["x"],
    }).encode()  # fmt: skip
    if number < 10:
        if number % 2:
            return MessagesConverter(translate_messages(asked), "m", "msg_1")
        return ReplyConverter(translate_request(OLLAMA[0], asked), "m", lambda: "now", dict)
    is_embedding = number == 15 and not stream
    path = EMBEDDING_PATH if is_embedding else CHAT.engine_path
    triton = translate_for_triton(path, asked, TRITON_BACKENDS["auto"], "m", wants_usage=True)
    first = TritonConverter(triton, "m", "1", 1)
    return (
        ChainedConverter(first, MessagesConverter(translate_messages(asked), "m", "msg_1")) if number == 14 else first
    )


def check_response(number: int, body: bytes) -> None:
    """Check that a response becomes valid JSON, or is broken; and that a stream may arrive in any pieces."""
    stream = number < 7 or number == 13
    whole = make_converter(number, stream=stream).convert(200, body)
    for line in whole.splitlines() if stream else [whole] if whole else []:
        check_line(line)
    json.loads(make_converter(number, stream=stream).convert(500, body))
    one, two = make_converter(number, stream=True), make_converter(number, stream=True)
    expected = one.feed(body) + one.finish()
    half = len(body) // 2
    found = two.feed(body[:half])
    found += two.feed(body[half:]) + two.finish()
    if not one.broken:
        assert found == expected
    for line in expected.splitlines():
        check_line(line)


def check_line(line: bytes) -> None:
    """Check that the line of a stream is JSON, a name of an event, or the end."""
    if line and not line.startswith(b"event: ") and line != b"data: [DONE]":
        json.loads(line.removeprefix(b"data: "))


# --- Responses API and rerank ---------------------------------------------------------------------------------------

RERANKS = tuple(
    (RERANK_AND_TOKENIZE[path], target)
    for path in (b"/v1/rerank", b"/v1/score")
    for form in ("jina", "tei")
    if (target := find_target((form,))) is not None
)
RESPONSES_REQUEST = (
    b'{"model":"m","instructions":"a","input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":'
    b'"input_image","image_url":"u"}]},{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"h"}]},'
    b'{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c",'
    b'"output":[{"type":"input_text","text":"\\ud83d\\ude00"}]}],"stream":true,"store":false,"tools":[{"type":"function",'
    b'"name":"f","parameters":{}}],"tool_choice":{"type":"allowed_tools","mode":"auto","tools":[{"type":"function","name":'
    b'"f"}]},"text":{"format":{"type":"json_schema","name":"n","schema":{}}},"reasoning":{"effort":"low"},"min_p":1}'
)
RERANK = b'{"model":"m","query":"q","documents":["a",{"text":"b"}],"top_n":1,"return_documents":true}'
SCORE = b'{"model":"m","text_1":"q","text_2":["a","b"]}'
RANKS = (
    b'[{"index":0,"score":0.5},{"index":1,"score":1}]',
    b'{"results":[{"index":1,"relevance_score":0.5},{"index":0,"relevance_score":1}],"usage":{"total_tokens":3}}',
)
COUNT = len(RERANKS)
RESPONSES_KINDS = 2 * COUNT + 3
"""Requests and responses of rerank; a request, a document and a stream of the Responses API."""
RESPONSES_SEEDS = tuple(
    bytes((number,)) + one
    for number in range(RESPONSES_KINDS)
    for one in (RESPONSES_REQUEST, RERANK, SCORE, *RANKS, STREAM, DOCUMENT)
)
RESPONSES_WORDS = (*WORDS, b'"documents":', b'"text":', b'"index":', b'"score":', b'"role":', b'"output":')


def responses(data: bytes) -> None:
    """Translate a request, or convert a response, by the first byte of the input."""
    number, body = data[0] % RESPONSES_KINDS if data else 0, data[1:]
    if number < COUNT or number == 2 * COUNT:
        check_responses_request(number, body)
    elif number < 2 * COUNT:
        check_ranks(number - COUNT, body)
    else:
        check_responses(body, stream=number == RESPONSES_KINDS - 1)


def check_responses_request(number: int, body: bytes) -> None:
    """Check that a request is rejected with 400, or translated to a body that the gateway can read and edit."""
    try:
        if number < COUNT:
            operation, target = RERANKS[number]
            made: TranslatedRequest = translate_rerank(operation, body, target)
        else:
            made = translate_responses(body)
        peek = body_members.read_body(made.target, made.body, b"application/json", None, "default")
        json.loads(made.body)
        assert peek.stream == made.stream
    except CallError as error:
        if error.status != 400:
            raise


def check_ranks(number: int, body: bytes) -> None:
    """Check that a response of rerank becomes valid JSON, or is broken."""
    operation, target = RERANKS[number]
    asked = SCORE if operation.dialect == "score" else RERANK
    for status in (200, 500):
        one = RerankConverter(translate_rerank(operation, asked, target), "m", "1", 7)
        made = one.convert(status, body)
        assert one.broken == (not made)
        if made:
            json.loads(made)


def make_responses_converter(*, stream: bool) -> ResponsesConverter:
    """Return a new converter of the Responses API."""
    request = json.dumps({"model": "m", "input": "a", "stream": stream, "tools": []})
    return ResponsesConverter(translate_responses(request.encode()), "m", "1", 7)


def check_responses(body: bytes, *, stream: bool) -> None:
    """Check that a response becomes valid JSON, or is broken; and that a stream may arrive in any pieces."""
    whole = make_responses_converter(stream=stream).convert(200, body)
    for line in whole.splitlines() if stream else [whole] if whole else []:
        check_line(line)
    json.loads(make_responses_converter(stream=stream).convert(500, body))
    one, two = make_responses_converter(stream=True), make_responses_converter(stream=True)
    expected = one.feed(body) + one.finish()
    half = len(body) // 2
    found = two.feed(body[:half])
    found += two.feed(body[half:]) + two.finish()
    if not one.broken:
        assert found == expected
    for line in expected.splitlines():
        check_line(line)
