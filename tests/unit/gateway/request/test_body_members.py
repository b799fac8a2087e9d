"""Reading and editing of a JSON body: top-level members, each once; all other bytes stay unchanged."""

from __future__ import annotations

import json
from time import process_time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import CallError
from gateway.http.body_buffers import LARGE_BYTES, ChunkedBody
from gateway.request.api_routes import Operation, find_operation
from gateway.request.body_members import Peek, edit_body, edit_json, read_body, read_json
from gateway.request.json_scanner import MEMBERS_MAX
from gateway.request.multipart import Form
from tests.support.example_budget import examples
from tests.support.net.upstream_requests import in_one, json_members

CHAT = find_operation(b"POST", b"/v1/chat/completions")
EMBEDDINGS = find_operation(b"POST", b"/v1/embeddings")
TRANSCRIPTIONS = find_operation(b"POST", b"/v1/audio/transcriptions")


def refusal(body: bytes) -> CallError:
    with pytest.raises(CallError) as caught:
        read_json(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    return caught.value


def operation(found: Operation | None) -> Operation:
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("body", "model", "stream", "wants_usage"),
    [
        (b'{"model":"m"}', "m", False, False),
        (b'{"mod\\u0065l":"m"}', "m", False, False),
        (b' \r\n\t{ "a" : [ 1 , {"model":"x"} ] ,\n "model" : "m" , "stream" : null } \n', "m", False, False),
        (b'{"model": "m", "stream": true}', "m", True, False),
        (b'{"model":"m","stream":false}', "m", False, False),
        (b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}', "m", True, True),
        (b'{"model":"m","stream":true,"stream_options":{"include_usage": false }}', "m", True, False),
        (b'{"model":"m","stream":true,"stream_options":null}', "m", True, False),
        (b'{"model":"m","stream_options":{"include_usage":true}}', "m", False, False),
        (b'{"model":"caf\\u00e9"}', "café", False, False),
        ('{"model":"café","é":1}'.encode(), "café", False, False),
        (b'{"model":"m","a\\"b":1,"c\\\\":2,"":3}', "m", False, False),
        (b'{"model":"m","a":-1.5e+300,"b":[],"c":{},"d":"","e":[[[]]]}', "m", False, False),
    ],
)
def test_model_stream_and_include_usage_are_read_from_a_json_body(
    body: bytes, model: str, stream: bool, wants_usage: bool
) -> None:
    peek = read_json(body)
    assert (peek.model, peek.stream, peek.wants_usage) == (model, stream, wants_usage)
    assert peek.body is body


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"}", b"null", b"[]", b'"model"', b'[{"model":"m"}]', b'{"model":"m"}x', b'{"model":"m"}{}',
        b'{"model":"m",}', b"{'model':'m'}", b'{"model":"m" "a":1}', b'{"model":"m","a":NaN}', b'{"model":"m","a":01}',
        b'{"model":"m","a":Infinity}', b'{"model":"m","a":tru}', b'{"model":"m"/**/}', b'{"model":"m","a":"\x01"}',
        b'{"model":"m","a":"\n"}', b'{"model":"m","a":"\\x"}', b'\xef\xbb{"model":"m"}',
        b'{"model":"m","a":"\xff"}',
        b'{"model":"m","a":"\xed\xa0\x80"}', b'{"model":"m","a":"\xc0\x80"}', b'{"model":"m","\xff":1}',
        '{"model":"m"}'.encode("utf-16"), b'{"model":"m","\\ud800":1}', b'{model:"m"}', b'\0{"model":"m"}',
    ],
)  # fmt: skip
def test_body_that_is_not_a_json_object_in_utf_8_is_rejected(body: bytes) -> None:
    refusal(body)


@pytest.mark.parametrize("body", [b"{}", b'{"a":1}', b'{"model":""}', b'{"Model":"m"}', b'{"a":{"model":"m"}}'])
def test_body_without_model_is_rejected_with_param_model(body: bytes) -> None:
    assert refusal(body).param == "model"


@pytest.mark.parametrize("value", [b"1", b"null", b"true", b"[]", b'{"a":1}', b'["m"]'])
def test_model_that_is_not_a_string_is_rejected(value: bytes) -> None:
    assert refusal(b'{"model":' + value + b"}").param == "model"


@pytest.mark.parametrize("value", [b"1", b'"true"', b"[]", b"0"])
def test_stream_that_is_not_a_boolean_is_rejected(value: bytes) -> None:
    assert refusal(b'{"model":"m","stream":' + value + b"}").param == "stream"


@pytest.mark.parametrize(
    "options", [b"1", b"[]", b'{"include_usage":1}', b'{"include_usage":true,"include_usage":false}', b'"x"']
)
def test_invalid_stream_options_are_rejected(options: bytes) -> None:
    assert "stream_options" in refusal(b'{"model":"m","stream":true,"stream_options":' + options + b"}").message


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{"model":"a","mod\\u0065l":"b"}',
        b'{"mod\\u0065l":"a","m\\u006fdel":"b"}',
        b'{"model": "a", "model": "b"}',
        b'{"a":1,"b":2,"a":1,"model":"m"}',
        b'{"":1,"":1,"model":"m"}',
        b'{"model":"m","a":1,"a":12}',
        b'{"model":"m","a":12,"a":1}',
        b'{"model":"m","a":[1],"a":[1,2]}',
        # As long as the spaced form of the remaining members: an equal length proves nothing.
        b'{"model":"m","a":1,"b":2,"c":3,"a":12}',
        b'{"model":"x", "model": "x"}',
        # A first value that contains what the parser expects after the last one.
        b'{"a": "1, \\"b\\": 2", "b": 2, "a": "1", "model": "m"}',
        b'{"a": "x", "b": 1, "model": "m", "a": "x"}',
    ],
)
def test_body_with_a_repeated_member_is_rejected(body: bytes) -> None:
    assert "more than once" in refusal(body).message


NAMES = st.sampled_from(
    ["model", "a", "b", "", "a b", 'q"', "\\", "é", "1", ", ", '": "', "cache_salt", "stream_options"]
)
VALUES = st.recursive(
    st.sampled_from([1, 12, True, None, "", "x", '", "a": 1', "é", 1.5, "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def written(name: str, value: object, style: int) -> str:
    """Return one member in one of the usual JSON notations."""
    escaped = "".join(f"\\u{ord(character):04x}" for character in name)
    key = f'"{escaped}"' if style & 1 else json.dumps(name, ensure_ascii=not style & 2)
    colon = ": " if style & 4 else ":"
    return key + colon + json.dumps(value, separators=(",", ":") if style & 8 else None)


@settings(derandomize=True, deadline=None, max_examples=examples(500))
@given(
    members=st.lists(st.tuples(NAMES, VALUES, st.integers(0, 15)), max_size=6),
    comma=st.sampled_from([",", ", ", " ,\n "]),
)
@example(members=[("model", "m", 0), ("a", 1, 0), ("a", 12, 0)], comma=",")
def test_repeated_members_are_rejected_in_any_json_layout(members: list[tuple[str, object, int]], comma: str) -> None:
    text = "{" + comma.join(['"model":"m"', *(written(*member) for member in members)]) + "}"
    body = text.encode()
    names = [name for name, _ in json_members(body)]
    repeated = len(set(names)) < len(names)
    try:
        peek = read_json(body)
    except CallError:
        assert repeated, text
        return
    assert not repeated, text
    edited = edit_json(peek, model="other", include_usage=False)
    expected = dict(json_members(body)) | {"model": "other"}
    expected.pop("cache_salt", None)
    assert dict(json_members(in_one(edited))) == expected
    assert list(peek.members) == names


@settings(derandomize=True, deadline=None, max_examples=examples(500))
@given(
    parts=st.lists(
        st.sampled_from(
            [b"{", b"}", b"[", b"]", b'"', b":", b",", b'"model"', b'"m"', b"\\", b"\\u0065", b" ", b"1", b"null"]
        )
        | st.binary(max_size=4),
        max_size=20,
    )
)
@example(parts=[b'{"\\u006dodel" :', b'"m"', b"}"])
def test_random_body_is_rejected_or_yields_its_model_name(parts: list[bytes]) -> None:
    try:
        peek = read_json(b"".join(parts))
    except CallError:
        assert parts[1:] != [b'"m"', b"}"]
        return
    assert dict(json_members(in_one(peek.body)))["model"] == peek.model


def test_body_that_needs_no_edit_is_returned_as_the_same_object() -> None:
    body = b'{ "model": "m", "stream": true, "stream_options": {"include_usage": true} }'
    assert edit_json(read_json(body), model="m", include_usage=True) is body
    assert edit_json(read_json(body), model=None, include_usage=True) is body


@pytest.mark.parametrize(
    ("body", "edited"),
    [
        (b'{"model":"m","x":1.0e0}', b'{"model":"served","x":1.0e0}'),
        (b'{ "x" : [ 1, "\\u00e9" ], "model" : "m" }', b'{"x":[ 1, "\\u00e9" ],"model":"served"}'),
        (b'{"mod\\u0065l":"m","a\\"":1}', b'{"model":"served","a\\"":1}'),
        (b'{"model":"m","cache_salt":"stolen","n":1}', b'{"model":"served","n":1}'),
        (b'{"model":"served","cache\\u005fsalt":"x"}', b'{"model":"served"}'),
        (b'{"model":"m","stream":true}', b'{"model":"served","stream":true,"stream_options":{"include_usage":true}}'),
        (
            b'{"model":"m","stream":true,"stream_options":{"a":1,"include_usage":false},"z":0}',
            b'{"model":"served","stream":true,"stream_options":{"a":1,"include_usage":true},"z":0}',
        ),
        (
            b'{"model":"m","stream":true,"stream_options":null}',
            b'{"model":"served","stream":true,"stream_options":{"include_usage":true}}',
        ),
        (b'{"model":"m","stream":false,"stream_options":1}', b'{"model":"served","stream":false,"stream_options":1}'),
    ],
)
def test_edit_changes_only_the_members_model_cache_salt_stream_options(body: bytes, edited: bytes) -> None:
    assert edit_json(read_json(body), model="served", include_usage=True) == edited


@pytest.mark.parametrize("large", [False, True])
def test_null_as_model_is_replaced_by_the_default_model(large: bool) -> None:
    body = b'{"prompt":"%b","model": null}' % (b"a" * (LARGE_BYTES if large else 3))
    pieces = ChunkedBody()
    pieces.add(body)
    peek = read_body(operation(CHAT), pieces if large else body, b"application/json", None, "m")
    assert peek.model == "m"
    assert json.loads(in_one(edit_body(operation(CHAT), peek, "served"))) == json.loads(body) | {"model": "served"}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("sent", ["", '"cache_salt":"stolen",'])
def test_cache_salt_of_the_client_never_reaches_the_engine(sent: str, large: bool) -> None:
    text = "a" * (LARGE_BYTES if large else 3)
    body = f'{{"model":"m",{sent}"prompt":"{text}"}}'.encode()
    for path, salted in ((b"/v1/completions", True), (b"/v1/embeddings", False)):
        operation = find_operation(b"POST", path)
        assert operation is not None
        pieces = ChunkedBody()
        pieces.add(body)
        read_of_it = read_body(operation, pieces if large else body, b"application/json")
        edited = json.loads(in_one(edit_body(operation, read_of_it, "m", "ours")))
        assert edited == {"model": "m", "prompt": text} | ({"cache_salt": "ours"} if salted else {})


def test_include_usage_is_added_only_on_paths_that_report_stream_usage() -> None:
    body = b'{"model":"m","stream":true}'
    assert b"include_usage" in in_one(edit_body(operation(CHAT), read_json(body), "m"))
    assert edit_body(operation(find_operation(b"POST", b"/v1/responses")), read_json(body), "m") is body
    assert edit_body(operation(find_operation(b"POST", b"/v1/messages")), read_json(body), "m") is body


def test_served_name_with_quotes_is_json_escaped_in_the_edited_body() -> None:
    edited = edit_json(read_json(b'{"model":"m"}'), model='/models/"a"\n', include_usage=False)
    assert json.loads(in_one(edited)) == {"model": '/models/"a"\n'}


def test_body_without_model_uses_the_model_of_path_or_header() -> None:
    assert read_json(b'{"input":"x"}', header_model="m").model == "m"
    assert read_json(b'{"model":"m"}', header_model="m").model == "m"
    peek = read_json(b'{"model":"gpt-4o"}', path_model="m")
    assert peek.model == "m"
    assert edit_json(peek, model="m", include_usage=False) == b'{"model":"m"}'
    peek = read_json(b'{"input":"x"}', path_model="m")
    assert edit_json(peek, model="m", include_usage=False) == b'{"input":"x","model":"m"}'


@pytest.mark.parametrize(("path", "body"), [(None, b'{"model":"a"}'), ("a", b"{}"), ("a", b'{"model":"b"}')])
def test_x_model_header_that_contradicts_body_or_path_is_rejected(path: str | None, body: bytes) -> None:
    with pytest.raises(CallError, match="x-model"):
        read_json(body, path_model=path, header_model="b")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10**6,
        b'{"model":"m","a":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
        b'{"a":' * 10**6 + b"1" + b"}" * 10**6,
        b'{"model":"m"' + b"".join(b',"k%d":1' % i for i in range(10**6)) + b"}",
        b'{"model":"m"' + b"".join(b',"k%d":1' % i for i in range(MEMBERS_MAX)) + b"}",
        b'{"model":"m"' + b',"messages":[{"a":1},{"b":2}]' * 10**5 + b"}",
    ],
    ids=["open", "deep", "deep objects", "many members", "one member too many", "the same member often"],
)
def test_hostile_nested_or_repetitive_json_is_rejected_in_linear_time(body: bytes) -> None:
    start = process_time()
    refusal(body)
    assert process_time() - start < 5.0, "in linear time"


def test_model_is_read_from_a_large_body_with_many_nested_values() -> None:
    messages = [{"role": "user", "content": "grüße: x"}] * 30_000
    body = json.dumps({"model": "m", "messages": messages}, ensure_ascii=False).encode()
    assert read_json(body).model == "m"


def test_invalid_utf_8_is_rejected_anywhere_in_a_large_body() -> None:
    filler = "é" * (1 << 19)
    body = ('{"model":"m","a":"x' + filler + '"}').encode()
    assert read_json(body).model == "m"
    refusal(body[:-40] + b"\xc3" + body[-40:])
    refusal(body + b"\xc3")


@pytest.mark.parametrize(
    "content_type",
    [
        b"application/json",
        b"Application/JSON; charset=UTF-8",
        b'application/json;charset="utf-8"',
        b"application/json; charset=utf-8;",
        b"application/json;",
        b'application/json ; ; a=b;c="d;\\""',
        b"application/json; charset=utf-16",
    ],
)
def test_body_with_any_form_of_the_json_media_type_is_read_as_json(content_type: bytes) -> None:
    assert isinstance(read_body(operation(EMBEDDINGS), b'{"model":"m"}', content_type), Peek)


@pytest.mark.parametrize(
    "content_type",
    [
        b"", b"text/plain", b"application/x-www-form-urlencoded", b"application/jsonp",
        b"application/octet-stream;", b"no type",
    ],
)  # fmt: skip
def test_body_of_another_media_type_is_accepted_only_as_a_json_object(content_type: bytes) -> None:
    for body in (b'{"model":"m"}', b'\xef\xbb\xbf \r\n{"model":"m"}'):
        assert isinstance(read_body(operation(EMBEDDINGS), body, content_type), Peek)
    for body in (b"model=m", b"", b"[]", b'"{"'):
        with pytest.raises(CallError) as caught:
            read_body(operation(EMBEDDINGS), body, content_type)
        assert caught.value.status == 415


def test_form_on_a_path_that_accepts_no_form_is_rejected_with_415() -> None:
    with pytest.raises(CallError) as caught:
        read_body(operation(EMBEDDINGS), b'{"model":"m"}', b"multipart/form-data; boundary=b")
    assert caught.value.status == 415


def test_form_on_a_path_that_accepts_files_gets_the_served_model_name() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    form = read_body(operation(TRANSCRIPTIONS), body, b"Multipart/Form-Data; boundary=b")
    assert isinstance(form, Form)
    assert edit_body(operation(TRANSCRIPTIONS), form, "served") == body.replace(b"\r\nm\r\n", b"\r\nserved\r\n")


def test_byte_order_mark_is_accepted_and_not_forwarded() -> None:
    body = b'{"model":"m","input":"a"}'
    peek = read_json(b"\xef\xbb\xbf" + body)
    assert edit_json(peek, model="m", include_usage=False) == body
    assert edit_json(peek, model="n", include_usage=False) == body.replace(b'"m"', b'"n"')


@pytest.mark.parametrize(
    "value",
    [
        rb'"\ud800"', rb'"a\uDFFFb"', rb'["\ud83d\ud83d\ude00",{"\udc00":1}]', rb'"\\\ud800\\"',
        rb'"\\\\\ud83d\ude00\udbff"',
    ],
)  # fmt: skip
def test_escaped_lone_surrogate_in_a_value_is_forwarded_unchanged(value: bytes) -> None:
    body = rb'{ "input" : %b ,"mod\u0065l":"m", "a\\b": 1 }' % value
    assert edit_json(read_json(body), model="m", include_usage=False) is body
    edited = edit_json(read_json(body), model="n", include_usage=False)
    assert edited == rb'{"input":%b,"model":"n","a\\b":1}' % value


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model":"m","model":"m","a":"\ud800"}', rb'{"model":"m","a":"\ud800",}', rb'{"model":"\ud800"}',
        rb'{"model":"m","a":"\\ud800\x"}', b'{"model":"m","a":"\\ud800","b":"\0"}',
    ],
)  # fmt: skip
def test_body_with_a_lone_surrogate_and_another_error_is_rejected(body: bytes) -> None:
    refusal(body)


@pytest.mark.parametrize("name", [b"id_slot", b"slot_id"])
def test_engine_slot_number_in_a_body_is_rejected_unless_it_is_minus_1(name: bytes) -> None:
    body = b'{"model":"m","%b":-1}' % name
    assert edit_json(read_json(body), model="m", include_usage=False) is body
    for value in (b"0", b"1", b"-2", b"-1.0", b'"-1"', b"null", b"[-1]"):
        assert name.decode() in refusal(b'{"model":"m","%b":%b}' % (name, value)).message
    assert refusal(b'{"model":"m","%b":-1,"rid":"a"}' % name).param == "rid"
