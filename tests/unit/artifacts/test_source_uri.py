"""Source URIs of weights, as written in documents."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from artifacts import source_uri
from artifacts.reference import BadReferenceError, Reference
from artifacts.source_uri import Bucket, Hub, Local
from tests.support.example_budget import examples

COMMIT = "c0ffee" + "0" * 34


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("file:///models/a.gguf", Local("/models/a.gguf")),
        ("file:///models/with space/", Local("/models/with space/")),
        ("hf://Qwen/Qwen3-0.6B", Hub("Qwen/Qwen3-0.6B")),
        ("hf://gpt2@refs/pr/4", Hub("gpt2", "refs/pr/4")),
        (f"hf://meta-llama/Llama-3.1-8B@{COMMIT}", Hub("meta-llama/Llama-3.1-8B", COMMIT)),
        ("hf://a/b@main?include=*Q4_K_M*.gguf,config.json", Hub("a/b", "main", ("*Q4_K_M*.gguf", "config.json"))),
        ("hf://a/b?include=sub/x.gguf", Hub("a/b", None, ("sub/x.gguf",))),
        ("s3://models/llama/8b/", Bucket("models", "llama/8b/")),
        ("s3://my.bucket-1/a b.gguf", Bucket("my.bucket-1", "a b.gguf")),
        ("oci://ghcr.io/a/b:c", Reference("ghcr.io", "a/b", "c")),
        ("ollama://qwen3:8b", Reference("registry.ollama.ai", "library/qwen3", "8b")),
    ],
)
def test_source_uri_is_parsed_to_its_local_hub_bucket_or_registry_source(text: str, found: object) -> None:
    assert source_uri.parse_source_uri(text) == found
    if isinstance(found, Hub | Bucket):
        assert str(found) == text


def test_hugging_face_source_is_pinned_only_by_a_full_commit_hash() -> None:
    assert Hub("a/b", COMMIT).pinned
    assert not Hub("a/b", "main").pinned
    assert not Hub("a/b", COMMIT.upper()).pinned
    assert not Hub("a/b").pinned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "expected oci://") for text in ("", "model.gguf", "/models/a.gguf", "https://example.com/a.gguf")),
        ("OCI://ghcr.io/a", "expected oci://"),
        *((text, "absolute path") for text in ("file://models/a.gguf", "file:///")),
        ("file:///a\nb", "can be shown"),
        *((text, "hf://owner/name@revision") for text in ("hf://", "hf://a/b/c", "hf://a/..", "hf://../a")),
        *((text, "hf://owner/name@revision") for text in ("hf://a/b@", "hf://a/b@../../api")),
        *((text, "path patterns") for text in ("hf://a/b@x?y", "hf://a/b?include=", "hf://a/b?exclude=x")),
        ("hf://a/b?include=a,,b", "path patterns"),
        ("hf://a/b?include=" + ",".join("abcdefghijklmnopq"), "more than 16"),
        *((text, "a bucket has") for text in ("s3://ab/x", "s3://Bucket/x", "s3://a..b/x")),
        *((text, "its key is empty") for text in ("s3://bucket", "s3://bucket/", "s3://bucket/a/../b")),
        ("s3://bucket/a//b", "its key is empty"),
        ("oci://ghcr.io/A", "lower-case"),
        ("x" * 5000, "at most 4096"),
    ],
)
def test_invalid_source_uris_are_rejected_with_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(BadReferenceError) as caught:
        source_uri.parse_source_uri(text)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@settings(derandomize=True, deadline=None, max_examples=examples(400))
@given(
    st.sampled_from(["hf://abc", "hf://abc/d", "s3://abc/d"]),
    st.lists(
        st.sampled_from(["/a", "/a-b", "a.b", "@main", "/..", "/."]) | st.text("a.@:/\\%?-", max_size=3), max_size=3
    ),
)
def test_parsed_source_uris_contain_no_dot_dot_segments(start: str, more: list[str]) -> None:
    try:
        found = source_uri.parse_source_uri(start + "".join(more))
    except BadReferenceError:
        reject()
    if isinstance(found, Hub):
        assert re.fullmatch(r"[A-Za-z0-9._/@-]+", f"{found.name}@{found.revision}")
        assert ".." not in f"{found.name}/{found.revision}"
    if isinstance(found, Bucket):
        assert not {".", ".."} & set(found.key.split("/"))
