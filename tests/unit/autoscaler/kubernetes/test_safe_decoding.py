"""What an API server sends is decoded object by object: one that cannot be decoded does not affect the others."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.kubernetes import safe_decoding
from autoscaler.kubernetes.safe_decoding import DEPTH_MAX, ListPage
from autoscaler.kubernetes.unreadable_objects import Unreadable
from tests.support.example_budget import examples

METADATA = {"name": "m", "namespace": "n", "resourceVersion": "7"}
LONE = re.compile("[\ud800-\udfff]")
TOO_DEEP = f"its values are nested more than {DEPTH_MAX} levels deep"
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('ab"\\[]{}', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\[]{}', max_size=3), inner, max_size=3),
    max_leaves=12,
)


def nested(levels: int, inside: str = "1") -> str:
    """JSON nested this many levels deep."""
    return '{"a":' * levels + inside + "}" * levels


def model(spec: str, name: str = "m") -> bytes:
    """The JSON of a Model. Its spec may be nested two levels less than the whole object."""
    return f'{{"kind":"Model","metadata":{json.dumps({**METADATA, "name": name})},"spec":{spec}}}'.encode()


def depth(value: Any) -> int:
    """The nesting depth of a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@pytest.mark.parametrize("inside", ["1", '"]]}}"', '"\\"]}\\\\"', '[{"b":"{["}]'])
def test_nesting_limit_of_an_object_ignores_brackets_in_its_strings(inside: str) -> None:
    most = DEPTH_MAX - 1 - inside.startswith("[") * 2
    assert isinstance(safe_decoding.read_object(model(nested(most, inside))), dict)
    assert safe_decoding.read_object(model(nested(most + 1, inside))) == Unreadable("Model", "n", "m", "7", TOO_DEEP)


@pytest.mark.parametrize("levels", [1_100, 100_000])
def test_event_with_too_deep_object_still_identifies_the_object(levels: int) -> None:
    line = b'{"type":"ADDED","object":' + model(nested(levels)) + b"}"
    assert safe_decoding.read_event(line) == ("ADDED", Unreadable("Model", "n", "m", "7", TOO_DEEP))


def test_object_with_too_deep_metadata_keeps_its_name() -> None:
    fields = f'"managedFields":[{nested(5_000)}],"name":"m","namespace":"n","resourceVersion":"7"'
    found = safe_decoding.read_object(f'{{"kind":"Model","metadata":{{{fields}}}}}'.encode())
    assert found == Unreadable("Model", "n", "m", "7", TOO_DEEP)


@pytest.mark.parametrize("levels", [500, 5_000])
def test_page_with_unreadable_objects_decodes_the_others(levels: int) -> None:
    items = b",".join([model("1", "a"), model(nested(levels), "b"), model('{"x":1e999}', "c"), model("2", "d")])
    text = b'{"kind":"ModelList","metadata":{"resourceVersion":"9","continue":"t"},"items":[' + items + b"]}"
    (page,) = safe_decoding.read_pages(text)
    assert (page.version, page.token) == ("9", "t")
    assert [(one["metadata"]["name"], one["spec"]) for one in page.items] == [("a", 1), ("d", 2)]
    assert [(one.kind, one.name) for one in page.unreadable] == [("Model", "b"), ("Model", "c")]


@pytest.mark.parametrize("written", ["\\ud800", "\\ude00\\ud83d", "\\uDBFFx", "\\\\\\uD800"])
def test_unpaired_surrogate_is_replaced_in_a_listed_or_watched_object(written: str) -> None:
    """The API server accepts and returns them, for example in the opaque parameters of a ResourceClaim."""
    value, items = f'{{"a":"{written}","b":"\\ud83d\\ude00"}}', [model("1", "a")]
    items += [model(value, "b"), model(value[:-1] + ',"c":' + nested(2_000) + "}", "c"), model("2", "d")]
    (page,) = safe_decoding.read_pages(b'{"kind":"ModelList","metadata":{},"items":[' + b",".join(items) + b"]}")
    assert [one["metadata"]["name"] for one in page.items] == ["a", "b", "d"]
    assert [(one.name, one.reason) for one in page.unreadable] == [("c", TOO_DEEP)]
    _, found = safe_decoding.read_event(b'{"type":"ADDED","object":' + items[1] + b"}")
    assert found == safe_decoding.read_object(items[1]) == page.items[1]
    assert page.items[1]["spec"]["b"] == "\U0001f600"
    assert "\ufffd" in page.items[1]["spec"]["a"]


@given(st.recursive(st.text('a"\\u\ud83d\ude00\ud800'), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_replacing_unpaired_surrogates_changes_nothing_else(value: Any) -> None:
    text = json.dumps({"a": value})
    expected = json.loads(text)
    found = msgspec.json.decode(safe_decoding.replace_unpaired_surrogates(text.encode()))
    assert found == json.loads(LONE.sub("\ufffd", json.dumps(expected, ensure_ascii=False)))


def test_list_of_large_objects_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [model("1", "a"), model("2", "b"), model(nested(500), "c"), model("3", "d"), model("4", "e")]
    monkeypatch.setattr(safe_decoding, "PART_BYTES_MAX", 2 * len(items[0]))
    text = b'{"kind":"ModelList","metadata":{"resourceVersion":"9","continue":"t"},"items":[' + b",".join(items) + b"]}"
    pages = list(safe_decoding.read_pages(text))
    names = [[one["metadata"]["name"] for one in page.items] + [one.name for one in page.unreadable] for page in pages]
    assert names == [["a", "b"], ["c"], ["d", "e"]]
    assert [(page.version, page.token) for page in pages] == [("9", ""), ("9", ""), ("9", "t")]
    assert list(safe_decoding.read_pages(b'{"kind":"ModelList","metadata":{"resourceVersion":"9"},"items":null}')) == [
        ListPage("9", "", [], [], ("", "Model"))
    ]


def test_unreadable_list_item_without_kind_gets_the_kind_of_its_list() -> None:
    item = b'{"metadata":{"name":"p"},"spec":' + nested(200).encode() + b"}"
    (page,) = safe_decoding.read_pages(b'{"kind":"PodList","metadata":{},"items":[' + item + b"]}")
    assert [(one.kind, one.name) for one in page.unreadable] == [("Pod", "p")]


@pytest.mark.parametrize(
    "text", [b'{"metadata":{"name":"m"},"a":"\xff"}', b'{"metadata":{"name":"m"},"a":' + b"9" * 5_000 + b"}"],
    ids=["no UTF-8", "a huge number"],
)  # fmt: skip
def test_object_with_invalid_utf8_or_a_huge_number_is_unreadable_but_named(text: bytes) -> None:
    found = safe_decoding.read_object(text)
    assert isinstance(found, Unreadable)
    assert found.name == "m"


def test_too_large_object_in_a_watch_event_is_unreadable() -> None:
    large = model(json.dumps("x" * safe_decoding.BYTES_MAX))
    _, found = safe_decoding.read_event(b'{"type":"ADDED","object":' + large + b"}")
    assert isinstance(found, Unreadable)
    assert found.reason == f"it has {len(large)} bytes, more than {safe_decoding.BYTES_MAX}"


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"type":"ADDED"}', b'{"type":"ADDED","object":' + b"[" * 5_000])
def test_invalid_watch_line_raises_decode_error(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        safe_decoding.read_event(line)


@given(VALUES, st.integers(0, 8))
@settings(max_examples=examples(200))
def test_truncated_json_is_one_level_deeper_than_the_nesting_limit(value: Any, depth_max: int) -> None:
    text = json.dumps(value).encode()
    cut = json.loads(safe_decoding.truncate_nesting(text, depth_max))
    if depth(value) <= depth_max:
        assert cut == value
    else:
        assert depth(cut) == depth_max + 1, "what takes its place is an object"


@given(VALUES)
@settings(max_examples=examples(100))
def test_json_is_too_deep_exactly_if_its_nesting_exceeds_the_limit(value: Any) -> None:
    text = json.dumps(value).encode()
    for levels in range(DEPTH_MAX - 8, DEPTH_MAX + 1):
        wrapped = b"[" * levels + text + b"]" * levels
        assert safe_decoding.is_too_deep(wrapped) == (levels + depth(value) > DEPTH_MAX)


@pytest.mark.parametrize(
    "metadata",
    ["null", "[]", '"m"', '{"name":1}', '{"name":["m"]}', '{"name":"m","resourceVersion":7}',
    '{"name":"m","annotations":{"a":1}}',
     '{"name":"m","labels":[]}', '{"name":"m","generation":1.5}', '{"name":"m","managedFields":[{"manager":{}}]}'],
)  # fmt: skip
def test_object_with_metadata_of_a_wrong_type_is_unreadable(metadata: str) -> None:
    _, found = safe_decoding.read_event(
        f'{{"type":"ADDED","object":{{"kind":"Model","metadata":{metadata}}}}}'.encode()
    )
    assert isinstance(found, Unreadable)
    assert found.reason.startswith("its metadata: Expected ")
    (page,) = safe_decoding.read_pages(
        f'{{"metadata":{{}},"items":[{{"metadata":{metadata}}},{{"metadata":{{}}}}]}}'.encode()
    )
    assert (len(page.items), len(page.unreadable)) == (1, 1)


def test_object_metadata_with_null_and_nested_fields_is_accepted() -> None:
    metadata = {
        **METADATA, "uid": "u", "generation": 3, "creationTimestamp": None, "generateName": "m-", "labels": None,
        "finalizers": ["f"],
        "annotations": {"a": "b"}, "ownerReferences": [{"kind": "K", "name": "n", "uid": "u", "controller": True}],
        "managedFields": [{"manager": "kubectl", "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:spec": {}}}],
    }  # fmt: skip
    _, found = safe_decoding.read_event(json.dumps({"type": "ADDED", "object": {"metadata": metadata}}).encode())
    assert found == {"metadata": metadata}
