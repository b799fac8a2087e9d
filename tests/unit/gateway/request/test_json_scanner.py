"""Large bodies: scanned in steps as they arrive, for any chunk boundaries, with the same result as small bodies."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import CallError
from gateway.http.body_buffers import Body, ChunkedBody, Edit, copy_range
from gateway.http.body_scan import STEP_UNITS
from gateway.request.api_routes import Operation, find_operation
from gateway.request.body_members import Peek, edit_body, read_body
from gateway.request.json_scanner import MEMBERS_MAX, NESTING_MAX, TOKEN_BYTES_MAX, VALUE_BYTES_MAX, JsonScan
from gateway.request.multipart import Form, FormScan, edit_multipart, read_multipart
from tests.support.example_budget import examples
from tests.support.net.upstream_requests import in_one, json_members

KIB = 1 << 10


def operation(path: bytes = b"/v1/chat/completions") -> Operation:
    found = find_operation(b"POST", path)
    assert found is not None
    return found


def arrived(body: bytes, *cuts: int) -> ChunkedBody:
    """Return the body, received in pieces split at these offsets and scanned after each piece."""
    pieces = ChunkedBody()
    scan = pieces.scan = JsonScan(pieces.parts)
    places = [0, *sorted({cut for cut in cuts if 0 < cut < len(body)}), len(body)]
    for start, end in itertools.pairwise(places):
        pieces.add(body[start:end])
        while not scan.step(len(pieces)):
            pass
    return pieces


def outcome(pieces: ChunkedBody) -> tuple[dict[str, bytes], bytes] | None:
    """Return the values read from the body, and the body after all possible edits; None if it is rejected."""
    scan = pieces.scan
    assert isinstance(scan, JsonScan)
    try:
        scan.check(len(pieces))
    except CallError:
        return None
    edits = {"cache_salt": None, "model": b'"served"', "stream_options": b'{"include_usage":true}'}
    return scan.values, pieces.edited(scan.splices(edits)).join()


def whole(body: bytes) -> tuple[dict[str, bytes], bytes] | None:
    return outcome(arrived(body))


def refusal(body: bytes) -> CallError:
    with pytest.raises(CallError) as caught:
        read_body(operation(), arrived(body), b"application/json")
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    return caught.value


READ = st.sampled_from(["model", "stream", "stream_options", "cache_salt"])
NAMES = READ | st.sampled_from(["a", "", 'q"', "\\", "é", "覚", ", ", '":{"'])
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", "x", '", "a": 1', "é", "\\", '\\"', "\n\t\x00", "]}", "{[", "\\u", "😀", "m" * 300]
)
SIMPLE = st.sampled_from([0, -1.5e30, 12345678901234567890, True, False, None]) | TEXTS
SMALL = SIMPLE | st.dictionaries(NAMES, SIMPLE, max_size=3) | st.lists(SIMPLE, max_size=3)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(NAMES | TEXTS, inner, max_size=4)
        | st.tuples(inner, st.integers(2, 60)).map(lambda many: [many[0]] * many[1])
    ),
    max_leaves=10,
)
MEMBERS = st.tuples(READ, SMALL) | st.tuples(TEXTS.filter(lambda name: name != "model"), VALUES)
BODIES = st.tuples(st.lists(MEMBERS, max_size=6), st.booleans(), st.sampled_from([None, 1, "\t"]), st.booleans()).map(
    lambda made: written(*made)
)


def written(members: list[tuple[str, object]], escaped: bool, indent: str | int | None, spaced: bool) -> bytes:
    """Return an object with these members, possibly repeated, in one of the usual JSON notations."""
    separators = (", ", " : ") if spaced else (",", ":")
    texts = [
        json.dumps({name: value}, ensure_ascii=escaped, indent=indent, separators=separators)[1:-1].strip()
        for name, value in members
    ]
    return (" \r\n{" + " ,\n".join(texts) + "\t} ").encode()


CUTS = st.lists(st.integers(1, 2000), max_size=5)


@settings(derandomize=True, deadline=None, max_examples=examples(600))
@given(body=BODIES, cuts=CUTS)
@example(body=b'{"cache_salt":"x"}', cuts=[])
@example(body=b'{"cache_salt":"x","model":[{}]}', cuts=[])
@example(body=b'{"a":1,"cache_salt":{"a":[1]} , "model" : "m"}', cuts=[])
def test_scanner_and_json_module_agree_on_any_random_object(body: bytes, cuts: list[int]) -> None:
    members = json_members(body)
    found = outcome(arrived(body, *cuts))
    if len(dict(members)) < len(members):
        assert found is None, "a member twice"
        return
    assert found is not None
    values, edited = found
    expected = dict(members)
    read_of_it = {name: expected[name] for name in ("model", "stream", "stream_options") if name in expected}
    assert {name: json.loads(value) for name, value in values.items() if name != "cache_salt"} == read_of_it
    assert ("cache_salt" in values) == ("cache_salt" in expected)
    expected.pop("cache_salt", None)
    changed = json_members(edited)
    assert len(dict(changed)) == len(changed)
    assert dict(changed) == expected | {"model": "served", "stream_options": {"include_usage": True}}


WORDS = st.sampled_from(
    [b"{", b"}", b"[", b"]", b'"', b":", b",", b'"model":"m"', b"\\", b'\\"', b"\\u0065", b"\\u00", b" ", b"\n", b"1",
     b"-", b"1e5", b"null", b"true", b"NaN", b"/*", b"*/", b"//", b"'", b"\x00", b"\xc3", b"\xa9", b"\xef\xbb\xbf",
     b'{"a":[', b"[[]]", b'"cache_salt":', b'"stream":true']
)  # fmt: skip
GARBAGE = st.lists(WORDS | st.binary(max_size=3), max_size=20).map(
    lambda parts: b'{"model":"m","a":[' + b"".join(parts)
)
MUTATED = st.tuples(BODIES, st.integers(0, 400), st.integers(0, 6), WORDS).map(
    lambda made: made[0][: made[1]] + made[3] + made[0][made[1] + made[2] :]
)


@settings(derandomize=True, deadline=None, max_examples=examples(1000))
@given(body=BODIES | GARBAGE | MUTATED, cuts=CUTS)
def test_split_body_gives_the_same_scan_result_as_the_whole_body(body: bytes, cuts: list[int]) -> None:
    found = whole(body)
    assert outcome(arrived(body, *cuts)) == found
    if len(body) < 300:
        assert outcome(arrived(body, *range(len(body)))) == found


@settings(derandomize=True, deadline=None, max_examples=examples(1000))
@given(body=GARBAGE | MUTATED)
def test_scan_of_a_large_body_reads_the_same_members_as_the_small_parser(body: bytes) -> None:
    """The scan checks less inside values; a body that both accept is read and edited alike."""
    try:
        small: Peek | None = read_as_json(body)
    except CallError:
        small = None
    if small is None:
        return
    large = read_as_json(arrived(body))
    assert (large.model, large.stream, large.wants_usage) == (small.model, small.stream, small.wants_usage)
    first, second = edit_body(operation(), small, "served"), edit_body(operation(), large, "served")
    assert isinstance(first, bytes)
    assert dict(json_members(in_one(second))) == dict(json_members(first))


def read_as_json(body: Body) -> Peek:
    found = read_body(operation(), body, b"application/json")
    assert isinstance(found, Peek)
    return found


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"[]",
        b'"model"',
        b'\xef\xbb{"model":"m"}',
        b' \xef\xbb\xbf{"model":"m"}',
        b'{"model":"m"',
        b'{"model":"m"}}',
        b'{"model":"m"} {}',
        b'{"model":"m"}\0',
        b'{"model":"m",}',
        b'{,"model":"m"}',
        b'{"model":"m","a"}',
        b'{"model":"m" "a":1}',
        b'{"model":"m","a":}',
        b'{"model":"m","a":NaN}',
        b'{"model":"m","a":Infinity}',
        b'{"model":"m","a":01}',
        b'{"model":"m","a":+1}',
        b'{"model":"m","a":.5}',
        b'{"model":"m","a":1.}',
        b'{"model":"m","a":1 2}',
        b'{"model":"m","a":nul}',
        b'{"model":"m","a":truefalse}',
        b'{"model":"m",a:1}',
        b"{'model':'m'}",
        b'{"model":"m"/* */}',
        b'{"model":"m",//\n"a":1}',
        b'{"mod\x00el":"m"}',
        b'{"model":"m","a\n":1}',
        b'{"model":"m","a\\x":1}',
        b'{"model":"m","\\ud800":1}',
        # Inside values: anything that could make another parser see other strings or brackets.
        b'{"model":"m","a":"\n"}',
        b'{"model":"m","a":"\\x41"}',
        b'{"model":"m","a":"\\u12"}',
        b'{"model":"m","a":["\x01"]}',
        b'{"model":"m","a":["\\\'"]}',
        b'{"model":"m","a":["\\u12"]}',
        b'{"model":"m","a":[/*"*/],"b":/*"*/1}',
        b'{"model":"m","a":[//"\n"]}',
        b'{"model":"m","a":[\'"\']}',
        b'{"model":"m","a":[#"\n"]}',
        b'{"model":"m","a":[\\"x"]}',
        b'{"model":"m","a":[_]}',
        b'{"model":"m","a":[NaN]}',
        b'{"model":"m","a":[\x0c]}',
        b'{"model":"m","a":[}',
        b'{"model":"m","a":[}]}',
        b'{"model":"m","a":[{]}}',
        b'{"model":"m","a":{]}',
        b'{"model":"m","a":' + b"[{" * 40 + b"]}" * 40 + b"}",
        b'{"model":"m","a":["\xff"]}',
        b'{"model":"m","a":"\xed\xa0\x80"}',
        b'{"model":"m","a":"\xc3"}',
        b'{"model":"m"}\xc3',
    ],
)
def test_invalid_or_ambiguous_json_is_rejected(body: bytes) -> None:
    message = refusal(body).message
    assert message in ("the body is not valid JSON in UTF-8", "the body must be one JSON object")
    assert outcome(arrived(body, *range(len(body)))) is None
    assert outcome(arrived(body + b" " * 40 * KIB)) is None


def test_nested_value_with_invalid_tokens_but_closed_brackets_is_accepted() -> None:
    """The engine parses the values completely and rejects these."""
    assert read_as_json(arrived(b'{"model":"m","a":[1 2,,tru],"b":{:}}')).model == "m"


def test_body_above_a_member_nesting_or_length_limit_is_rejected() -> None:
    names = b",".join(b'"%d":[]' % number for number in range(MEMBERS_MAX - 1))
    assert read_as_json(arrived(b'{"model":"m",' + names + b"}")).model == "m"
    assert "more than 1000" in refusal(b'{"model":"m",' + names + b',"x":1}').message
    assert "more than once" in refusal(b'{"model":"m","mod\\u0065l":"m"}').message
    deep = b"[" * NESTING_MAX + b"]" * NESTING_MAX
    for filler in (b"", b"1," * 9 * KIB, b"[]," * 9 * KIB, b"[[[[]]]]," * 9 * KIB):
        body = b'{"model":"m","a":[' + filler + deep[1:-1] + b"]}"
        assert read_as_json(arrived(body, 100, 20_000)).model == "m"
        body = b'{"model":"m","a":[' + filler + deep + b"]}"
        assert refusal(body).message == "the body is nested too deeply; nest fewer lists and objects"
    long = b"x" * VALUE_BYTES_MAX
    for name in ("model", "stream_options"):
        error = refusal(b'{"%b":"%b"}' % (name.encode(), long))
        assert (error.message, error.param) == (f"{name} is too long", name)
    assert read_as_json(arrived(b'{"model":"m","cache_salt":"%b"}' % long)).model == "m"
    for token in (b'"%b":1' % long[:TOKEN_BYTES_MAX], b'"a":%b' % (b"1" * TOKEN_BYTES_MAX)):
        assert "not valid JSON" in refusal(b'{"model":"m",' + token + b"}").message


HOSTILE = {
    "brackets": b"[],",
    "objects": b'{"":{}},',
    "tiny strings": b'"",',
    "escapes": b'"\\n\\\\\\"",',
    "deep": b"[" * 190 + b"]" * 190 + b",",
    "half deep": b"[" * 20 + b"{}," * 20 + b"{}" + b"]" * 20 + b",",
    "numbers": b"1,",
    "white space": b"\n",
    "text": b'"wake up, the town is asleep",',
    "wide": '"覚醒",'.encode(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_scan_step_of_a_hostile_body_reads_at_most_the_step_limit(name: str) -> None:
    """Two MiB in one piece are never scanned at once: a costly step reads a few windows at most."""
    body = b'{"model":"m","a":[' + HOSTILE[name] * ((2 << 20) // len(HOSTILE[name])) + b"1]}"
    pieces = ChunkedBody()
    scan = JsonScan(pieces.parts)
    pieces.add(body)
    steps = 1
    before = 0
    while not scan.step(len(pieces)):
        assert 0 < scan.offset - before <= STEP_UNITS
        before = scan.offset
        steps += 1
    scan.check(len(pieces))
    assert scan.values == {"model": b'"m"'}
    assert steps >= 2


def test_edited_chunked_body_reuses_the_buffers_of_unchanged_chunks() -> None:
    pieces = ChunkedBody()
    blocks = [bytes([65 + number]) * (64 * KIB) for number in range(4)]
    for block in blocks:
        pieces.add(block)
    for number in range(100):
        pieces.add(b"%02d" % number)
    assert (len(pieces), len(pieces.parts)) == (4 * 64 * KIB + 200, 5)
    assert copy_range(pieces.parts, 64 * KIB - 1, 128 * KIB + 1) == b"A" + blocks[1] + b"C"
    assert copy_range(pieces.parts, 5, 5) == b""
    edited = pieces.edited(
        [Edit(0, 1, b"first"), Edit(64 * KIB, 64 * KIB, b"in"), Edit(4 * 64 * KIB, len(pieces), b"")]
    )
    assert edited.join() == b"first" + blocks[0][1:] + b"in" + b"".join(blocks[1:])
    assert len(edited) == len(edited.join())
    assert edited.parts[-1] is blocks[3]
    assert pieces.join() == b"".join(blocks) + b"".join(b"%02d" % number for number in range(100))


def test_body_of_200_kib_in_one_byte_chunks_is_stored_in_four_buffers() -> None:
    pieces = ChunkedBody()
    for _ in range(200 * KIB):
        pieces.add(b"x")
    assert (len(pieces), len(pieces.parts)) == (200 * KIB, 4)


# --- forms -----------------------------------------------------------------------------------------------------------

TYPE = b"multipart/form-data; boundary=b"
PART = b"--b\r\nContent-Disposition: form-data; name="


def form(body: bytes | ChunkedBody) -> Form | CallError:
    try:
        return read_multipart(body, TYPE)
    except CallError as error:
        return error


FORMS = st.lists(
    st.sampled_from(
        [PART + b'"model"\r\n\r\nm\r\n', PART + b'"model"\r\n\r\nother\r\n', PART + b'"stream"\r\n\r\ntrue\r\n',
         PART + b'"file"; filename="a"\r\nContent-Type: a/b\r\n\r\n' + b"\0\r\n-\r\n--\r\n\r" * 4 + b"\r\n",
         PART + b'"file"\r\n\r\n\r\n', PART + b'"a"\r\n\r\n' + b"x" * 9000 + b"\r\n", b"--b--\r\n", b"--b--",
         b"\r\n--b\r\n", b"\n--b", b"--b\r\nX: y\r\n\r\n\r\n", b"\r\n", b"x", PART + b'"y"\r\n\r\n--b\r\n']
    ),
    max_size=6,
).map(lambda parts: b"".join([*parts, b"--b--\r\n"]))  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=examples(1000))
@given(body=FORMS, cuts=CUTS)
@example(body=PART + b'"model"\r\n\r\nm\r\n--b--', cuts=[])
@example(body=PART + b'"model"\r\n\r\nm\r\n\r\n--b--\r\n', cuts=[])
def test_large_form_parses_like_a_small_form_at_any_chunk_boundaries(body: bytes, cuts: list[int]) -> None:
    pieces = ChunkedBody()
    scan = pieces.scan = FormScan(pieces.parts, b"b")
    places = [0, *sorted({cut for cut in cuts if 0 < cut < len(body)}), len(body)]
    for start, end in itertools.pairwise(places):
        pieces.add(body[start:end])
        assert scan.step(len(pieces))
    small, large = form(body), form(pieces)
    if not isinstance(small, Form) or not isinstance(large, Form):
        assert small == large, "the same error"
        return
    assert large[1:] == small[1:]
    assert large.body is pieces
    edited = edit_multipart(large, model="served")
    assert isinstance(edited, ChunkedBody)
    assert edited.join() == edit_multipart(small, model="served")
    same = edit_multipart(large, model=small.model)
    assert isinstance(same, ChunkedBody)
    assert same.join() == edit_multipart(small, model=small.model)
    is_exact = body[small.start : small.end] == small.model.encode()  # a line end after the value is removed
    assert (same is pieces) == (is_exact and small.first == 0 and len(body) - small.after <= 2)
    added = edit_multipart(large._replace(has_model=False), model="served")
    assert isinstance(added, ChunkedBody)
    assert added.join() == edit_multipart(small._replace(has_model=False), model="served")
