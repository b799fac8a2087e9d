"""References and digests: accepted input, its parsed form, and a one-line error for all else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from artifacts import digest as digests
from artifacts import reference
from artifacts.digest import BadDigestError
from artifacts.reference import BadReferenceError
from tests.support.example_budget import examples

A = digests.parse_digest("sha256:" + "a" * 64)
LONG = digests.parse_digest("sha512:" + "0f" * 64)


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("llama", "docker.io", "library/llama", None, None),
        ("ai/smollm2:latest", "docker.io", "ai/smollm2", "latest", None),
        ("docker.io/llama:1", "docker.io", "library/llama", "1", None),
        ("index.docker.io/ai/x", "docker.io", "ai/x", None, None),
        ("oci://ghcr.io/owner/models/x:v1.0-rc.1", "ghcr.io", "owner/models/x", "v1.0-rc.1", None),
        ("localhost/x", "localhost", "x", None, None),
        ("registry:5000/a/b__c/d--e.f_g:T", "registry:5000", "a/b__c/d--e.f_g", "T", None),
        ("GHCR.IO:443/x", "ghcr.io:443", "x", None, None),
        ("oci://[::1]:5000/m:t", "[::1]:5000", "m", "t", None),
        ("[fe80::1]/m", "[fe80::1]", "m", None, None),
        (f"ghcr.io/x:t@{A}", "ghcr.io", "x", "t", A),
        (f"oci://127.0.0.1:5555/x@{LONG}", "127.0.0.1:5555", "x", None, LONG),
        ("ollama://qwen3:0.6b", "registry.ollama.ai", "library/qwen3", "0.6b", None),
        ("ollama://me/mine", "registry.ollama.ai", "me/mine", None, None),
        ("ollama://hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M", "hf.co", "Qwen/Qwen3-8B-GGUF", "Q4_K_M", None),
    ],
)
def test_reference_is_parsed_to_registry_repository_tag_and_digest(
    text: str, registry: str, repository: str, tag: str | None, digest: str | None
) -> None:
    found = reference.parse_reference(text)
    assert found == (registry, repository, tag, digest)
    if not text.startswith("ollama://"):
        assert reference.parse_reference(str(found)) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected|repository"),
        ("oci://ghcr.io/Owner/x", "lower-case"),
        *((text, "repository") for text in ("oci://", "ghcr.io/", "ghcr.io/../x", "ghcr.io/a//b", "ghcr.io/a/./b")),
        *((text, "repository") for text in ("ghcr.io/a/b/", "ghcr.io/a b", "ghcr.io/a?x=1", "ghcr.io/a%2e")),
        *((text, "expected oci://") for text in ("https://ghcr.io/x", "ghcr.io/a\n", "ghcr.io/\u0430", "x" * 2000)),
        *((text, "tag") for text in ("ghcr.io/a:", "ghcr.io/a:-x", "ghcr.io/a:" + "x" * 129)),
        *((text, "digest") for text in ("ghcr.io/a@", "ghcr.io/a@sha256:../../etc", "ghcr.io/a@sha256:" + "A" * 64)),
        *((text, "port") for text in ("host:0/a", "host:65536/a")),
        *((text, "host") for text in ("host:123456/a", "-host.example/a", "a..b/c")),
        ("[::g]/c", "host|IPv6"),
        ("[1:2]/c", "IPv6"),
        ("ghcr.io/" + "a" * 300, "255"),
        *((text, "ollama") for text in ("ollama://a/b/c/d", "ollama://a/../b", "ollama://")),
    ],
)
def test_invalid_references_are_rejected_with_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(BadReferenceError) as caught:
        reference.parse_reference(text)
    assert re.search(message, str(caught.value))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 320


def test_error_for_a_reference_with_a_password_hides_the_password() -> None:
    with pytest.raises(BadReferenceError) as caught:
        reference.parse_reference("oci://me:hunter2@ghcr.io/x")
    assert "hunter2" not in str(caught.value)


def test_reference_resolves_by_its_digest_else_its_tag_else_latest() -> None:
    assert reference.parse_reference("ghcr.io/x").asked == "latest"
    assert reference.parse_reference("ghcr.io/x:t").asked == "t"
    assert reference.parse_reference(f"ghcr.io/x:t@{A}").asked == A
    assert reference.parse_reference("x").host == "registry-1.docker.io"
    assert reference.parse_reference("ghcr.io/x").host == "ghcr.io"


@pytest.mark.point("3")
@pytest.mark.parametrize(
    "text",
    [
        *("sha256:../..", "sha256:" + "A" * 64, "sha256:" + "a" * 63, "sha256:" + "a" * 65, "sha256:", ""),
        *("sha1:" + "a" * 40, "md5:" + "a" * 32, "blake3:" + "a" * 64, "sha512:" + "a" * 64),
        *("sha256:" + "a" * 64 + "\n", "sha256-" + "a" * 64, "sha256:" + "\u0661" * 64, None, 7),
    ],
)
def test_malformed_or_unsupported_digests_are_rejected(text: object) -> None:
    with pytest.raises(BadDigestError, match="is not a digest") as caught:
        digests.parse_digest(text)
    assert "\n" not in str(caught.value)


@pytest.mark.point("3")
def test_sha512_digest_yields_its_algorithm_and_hex_value() -> None:
    assert digests.get_algorithm(LONG) == "sha512"
    assert digests.get_hex(LONG) == "0f" * 64
    assert digests.compute_digest(b"{}") == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@settings(derandomize=True, deadline=None, max_examples=examples(400))
@given(
    st.sampled_from(["a", "oci://a.b/c", "ollama://a", "oci://[::1]/a"]),
    st.lists(st.sampled_from(["/a", "b.c", "-e", "/..", ":1"]) | st.text("ab.:[]/@%\\-\u00e9", max_size=3), max_size=2),
)
def test_parsed_references_have_only_url_safe_characters_and_no_dot_dot(start: str, more: list[str]) -> None:
    try:
        found = reference.parse_reference(start + "".join(more))
    except BadReferenceError:
        reject()
    assert re.fullmatch(r"[a-z0-9.:\[\]-]+", found.registry)
    assert re.fullmatch(r"[A-Za-z0-9._/-]+", found.repository)
    assert not {"", ".", ".."} & set(found.repository.split("/"))
    assert re.fullmatch(r"[A-Za-z0-9._:-]+", found.asked)
