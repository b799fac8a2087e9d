"""Digests of files, remembered from their first download."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from artifacts import digest
from artifacts.sources import digest_cache, file_selection
from artifacts.sources.digest_cache import Sums
from artifacts.sources.file_selection import ListedFile
from artifacts.store.file_names import CopyKey
from artifacts.store.store import Store

KEY = CopyKey("s3 x", digest.compute_digest(b"copy"))
SUM = digest.compute_digest(b"a")
LISTED = file_selection.select_files(
    "s3://abc/m/", [ListedFile("a.gguf", 1, "etag:1"), ListedFile("b.json", 1, f"sha256:{'b' * 64}")]
)


def test_checksums_of_an_earlier_pull_apply_only_to_the_same_origin(tmp_path: Path) -> None:
    store = Store(tmp_path).open()
    Sums(store).remember(KEY, {"a.gguf": SUM})
    found = Sums(store).known(KEY, LISTED)
    assert [one.entry.digest for one in found.taken] == [SUM, f"sha256:{'b' * 64}"]
    assert Sums(store).known(CopyKey("s3 y", KEY.digest), LISTED) == LISTED


@pytest.mark.parametrize("text", [b"", b"[]", b'{"a.gguf": 1}', b'{"a.gguf": "sha256:1"}'])
def test_invalid_checksum_record_yields_no_known_checksums(tmp_path: Path, text: bytes) -> None:
    store = Store(tmp_path).open()
    Sums(store).remember(KEY, {"a.gguf": SUM})
    (tmp_path / "sums" / KEY.name).write_bytes(text)
    assert Sums(store).known(KEY, LISTED) == LISTED


def test_oldest_checksum_records_are_removed_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "SUMS_MAX", 2)
    store = Store(tmp_path).open()
    keys = [CopyKey(f"s3 {number}", KEY.digest) for number in range(4)]
    for number, key in enumerate(keys):
        Sums(store).remember(key, {"a.gguf": SUM})
        os.utime(tmp_path / "sums" / key.name, (number, number))
    assert {path.name for path in (tmp_path / "sums").iterdir()} == {key.name for key in keys[2:]}
