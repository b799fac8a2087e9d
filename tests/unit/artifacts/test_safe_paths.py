"""Untrusted paths: which are accepted, which collide, and that none escapes the folder."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from artifacts import digest, safe_paths
from artifacts.dialects import artifact_contents
from artifacts.oci.descriptor import Descriptor
from artifacts.oci.manifest import OCI_MANIFEST, Manifest
from artifacts.safe_paths import BadPathError, Tree
from tests.support.example_budget import examples

EMPTY = Descriptor("application/vnd.oci.empty.v1+json", digest.compute_digest(b"{}"), 2, {})
TITLE, FILEPATH = "org.opencontainers.image.title", "org.cncf.model.filepath"


def titled(*named: dict[str, str]) -> artifact_contents.Contents:
    """Return an artifact with one layer for each of these annotations."""
    layers = tuple(
        Descriptor("application/octet-stream", digest.compute_digest(str(number).encode()), 7, notes)
        for number, notes in enumerate(named)
    )
    return artifact_contents.read_contents(Manifest(OCI_MANIFEST, "", EMPTY, layers, {}))


@pytest.mark.parametrize(
    "path",
    [
        *("model.safetensors", "a/b/c/model-00001-of-00002.gguf", ".gitattributes", "..a/b..c"),
        *("with space/m\u00fcll.json", "ab:c", "\u6a21\u578b/config.json", "x" * 255, "console/com10.txt"),
        ".whale",
    ],
)
def test_relative_and_portable_path_is_returned_unchanged(path: str) -> None:
    assert safe_paths.check_path(path) == path


@pytest.mark.point("4")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((path, "in it") for path in ("../x", "..", "a/../../b", "a/./b", "a//b", "a/")),
        *((path, "absolute") for path in ("/etc/x", "//srv/x", "C:\\x", "c:x", "\\\\srv\\x", "a\\..\\b")),
        *((path, "unprintable") for path in ("a\0b", "a\nb", "a\u202eb", "a\ud800")),
        *((path, "longer than 255") for path in ("x" * 300, "\u00fc" * 128)),
        ("/".join(["abc"] * 300), "longer than 1024"),
        ("/".join("a" * 33), "deeper than 32"),
        *((path, "names no file") for path in (".", "")),
        *((path, "not a valid file name on every system") for path in ("con", "a/NUL.gguf", "a/lpt1", "a./b", "a ")),
        (" a", "not a valid file name on every system"),
        *((path, "reserved") for path in (".pilotlight-sidecar", "a/.PilotLight/x", ".wh.model.gguf")),
        ("a/.wh..wh..opq", "reserved"),
    ],
)
def test_path_that_is_unsafe_not_portable_or_reserved_is_rejected(path: str, message: str) -> None:
    with pytest.raises(BadPathError, match=message) as caught:
        safe_paths.check_path(path)
    assert str(caught.value).isprintable()
    whole = titled({TITLE: "model.gguf"}, {TITLE: path})
    if path:
        assert message in whole.layers[1].refusal
    assert "is refused" not in whole.layers[0].refusal
    with pytest.raises(artifact_contents.RefusedError, match="layer 2"):
        whole.files()


@pytest.mark.point("4")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.gguf", "a.gguf"),
        ("README.md", "readme.MD"),
        ("stra\u00dfe.json", "STRASSE.json"),
        ("m\u00fcll.json", "mu\u0308ll.json"),
        ("\ufb01.json", "fi.json"),
        ("\u3385.json", "kb.json"),
        ("a", "a/b"),
        ("a/b", "a"),
        ("A/x.gguf", "a"),
        ("a/b/c", "A/B"),
    ],
)
def test_path_that_collides_with_an_earlier_path_is_rejected(first: str, second: str) -> None:
    tree = Tree()
    tree.add(first)
    with pytest.raises(BadPathError, match=r"is (a duplicate|in conflict)") as caught:
        tree.add(second)
    assert str(caught.value).isprintable()


@pytest.mark.point("4")
def test_artifact_with_paths_that_differ_only_in_case_is_rejected() -> None:
    whole = titled({TITLE: "model.gguf"}, {TITLE: "MODEL.gguf"}, {TITLE: "b.gguf"})
    assert [bool(one.refusal) for one in whole.layers] == [False, True, False]
    with pytest.raises(
        artifact_contents.RefusedError, match=r"layer 2: its path 'MODEL.gguf' is in conflict with 'model.gguf'"
    ):
        whole.files()


@pytest.mark.point("4")
def test_paths_in_the_same_folder_are_accepted_together() -> None:
    tree = Tree()
    for path in ("a/b", "a/c", "a.gguf", "b/a", "ab"):
        tree.add(path)
    tree.add("a", folder=True)  # an archive may add more to a folder
    with pytest.raises(BadPathError, match="a duplicate"):
        tree.add("a/b", folder=True)


@pytest.mark.point("4")
def test_filepath_annotation_takes_precedence_over_the_title() -> None:
    whole = titled({FILEPATH: "a/model.gguf", TITLE: "../../model.gguf"}, {FILEPATH: "a/b.gguf", TITLE: "b.gguf"})
    assert [file.path for file in whole.files()] == ["a/model.gguf", "a/b.gguf"]
    assert "its filepath takes precedence over its other name '../../model.gguf'" in whole.layers[0].note
    assert not whole.layers[1].note, "a title that is the file's own name disagrees with nothing"
    bad = titled({FILEPATH: "../model.gguf", TITLE: "model.gguf"})
    assert "'../model.gguf'" in bad.layers[0].refusal, "a good title does not save a bad path"


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(
    st.lists(
        st.sampled_from(["a", "..", "ab:c"]) | st.text("\\aA: .\u0301\u00e9", min_size=1, max_size=4), max_size=3
    ).map("/".join)
)
def test_accepted_paths_never_escape_the_folder(text: str) -> None:
    try:
        path = safe_paths.check_path(text)
    except BadPathError:
        reject()
    assert path == text
    inside = os.path.normpath(f"/store/model/{path}")
    assert inside == f"/store/model/{path}", "it is in its plainest form, and below the folder"
    assert len(os.fsencode(path)) <= safe_paths.PATH_BYTES_MAX


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(st.lists(st.text("aA/\u00e9e\u0301", min_size=1, max_size=6), max_size=8))
def test_accepted_paths_never_collide_as_file_and_folder(texts: list[str]) -> None:
    tree, taken = Tree(), {"e"}
    tree.add("e")
    for text in texts:
        try:
            tree.add(safe_paths.check_path(text))
        except BadPathError:
            continue
        taken.add(text)
    keys = [safe_paths.make_collision_key(path) for path in taken]
    assert len(set(keys)) == len(keys)
    assert not any(one.startswith(f"{other}/") for one in keys for other in keys)
