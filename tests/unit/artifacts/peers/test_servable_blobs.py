"""What a store offers while it is being filled, and which callers see it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from artifacts import digest
from artifacts.download.partial_file import Partial
from artifacts.oci import blob_progress
from artifacts.peers import servable_blobs
from artifacts.peers.servable_blobs import BlobOffers, CompleteBlob, PartialBlob, RebuiltArchive
from artifacts.store.file_names import CopyKey
from artifacts.store.store import Store

CONTENT = bytes(range(250)) * 100
DIGEST, KEY = digest.compute_digest(CONTENT), CopyKey("registry.example", digest.compute_digest(b"{}"))
PART = 10_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", spare_bytes=0).open()


@pytest.fixture
def partial(store: Store, monkeypatch: pytest.MonkeyPatch) -> Partial:
    """A blob of three parts, none of which has been received."""
    monkeypatch.setattr(blob_progress, "SMALL_PART_BYTES", PART)
    return Partial(store.layout.partial(KEY) / "blobs", DIGEST, len(CONTENT))


def look(store: Store, *, private: bool = True) -> CompleteBlob | PartialBlob | None:
    found = BlobOffers(store.layout, private=private).blob(KEY.room, DIGEST)
    assert not isinstance(found, RebuiltArchive)
    if found is not None:
        os.close(found.number)
    return found


def test_peers_are_offered_only_the_complete_parts_of_a_partial_blob(store: Store, partial: Partial) -> None:
    found = look(store)
    assert isinstance(found, PartialBlob)
    assert found.fetching
    assert not found.has(0, 1)
    partial.put(PART, [CONTENT[PART : 2 * PART]])
    partial.put(0, [CONTENT[: PART - 1]])
    found = look(store)
    assert isinstance(found, PartialBlob)
    assert [found.has(*span) for span in ((PART, 2 * PART), (PART + 5, PART + 6))] == [True, True]
    assert not any(found.has(*span) for span in ((0, 5), (PART - 1, PART + 1), (PART, 2 * PART + 1), (PART, PART)))
    partial.put(PART - 1, [CONTENT[PART - 1 : PART]])
    found = look(store)
    assert isinstance(found, PartialBlob)
    assert found.has(0, 2 * PART)
    assert not found.has(0, len(CONTENT))


def test_verified_blob_is_offered_whole_before_its_pull_completes(store: Store, partial: Partial) -> None:
    partial.put(0, [CONTENT])
    folder = store.layout.partial(KEY) / "blobs"
    assert partial.publish(folder / DIGEST.replace(":", "-"))
    found = look(store)
    assert isinstance(found, CompleteBlob)
    assert found.size == len(CONTENT)


def test_blob_in_transfer_is_hidden_from_callers_without_the_token(store: Store, partial: Partial) -> None:
    partial.put(0, [CONTENT[:PART]])
    assert look(store, private=False) is None


def test_received_parts_of_a_stopped_pull_are_offered_as_not_fetching(store: Store, partial: Partial) -> None:
    partial.put(0, [CONTENT[:PART]])
    partial.close()
    path = next((store.layout.partial(KEY) / "blobs/partial").glob("sha256:*"))
    path = path.with_name(path.name.removesuffix(".parts"))
    long_ago_s = path.stat().st_mtime - servable_blobs.FETCHING_S - 1
    os.utime(path, (long_ago_s, long_ago_s))
    found = look(store)
    assert isinstance(found, PartialBlob)
    assert not found.fetching
    assert found.has(0, PART)


def test_symlink_or_folder_in_place_of_a_blob_is_not_offered(store: Store, tmp_path: Path) -> None:
    path = store.layout.blob(KEY, DIGEST)
    path.parent.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(CONTENT)
    path.symlink_to(tmp_path / "secret")
    assert look(store) is None
    path.unlink()
    path.mkdir()
    assert look(store) is None
    path.rmdir()
    path.write_bytes(CONTENT)
    assert isinstance(look(store), CompleteBlob)


def test_request_with_an_invalid_registry_folder_finds_no_blob(store: Store) -> None:
    (store.layout.root / DIGEST.replace(":", "-")).write_bytes(CONTENT)
    for room in ("", "..", KEY.room.upper(), f"{KEY.room}/..", f"{KEY.room}\n"):
        assert BlobOffers(store.layout, private=True).blob(room, DIGEST) is None


def test_blob_of_another_registry_is_not_offered(store: Store, partial: Partial) -> None:
    partial.put(0, [CONTENT[:PART]])
    assert look(store) is not None
    assert BlobOffers(store.layout, private=True).blob(CopyKey("other.example", KEY.digest).room, DIGEST) is None
