"""The blobs that a node's store offers to peers: complete ones, and received parts of those being fetched. I/O.

Only reads the store's folder, without locks: an open file stays readable even if it is removed meanwhile. A blob is
served only under its digest and from the folder of the registry in the request; without `private`, only if it
belongs to a Copy that was fetched without a login. Complete blobs were verified when they arrived. Parts were not: the
receiver verifies them as it does a registry's.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from artifacts.archives.archive_recipe import RECIPE_BYTES_MAX, Recipe, decode_recipe
from artifacts.digest import Digest
from artifacts.disk.durable_writes import Disk, list_entries
from artifacts.download import progress_file
from artifacts.download.partial_file import FOLDER
from artifacts.oci.blob_progress import BlobProgress
from artifacts.store.file_names import ORIGIN_DIGITS, digest_file_name
from artifacts.store.layout import StoreLayout
from artifacts.store.pull import RECIPES

FETCHING_S = 10.0
"""A partial file modified this recently belongs to a running pull."""
LOOK_EVERY_S = 1.0
"""Maximum age of the cached list of Copies."""
ORIGIN_FOLDER = re.compile(rf"[0-9a-f]{{{ORIGIN_DIGITS}}}")


class CompleteBlob(NamedTuple):
    """An open file with a complete blob; the caller closes it."""

    number: int
    size: int


class PartialBlob(NamedTuple):
    """A blob being fetched; `ledger` records which parts the open file has. The caller closes it."""

    number: int
    size: int
    ledger: BlobProgress | None
    fetching: bool
    """Whether a pull is running, rather than one that was interrupted."""

    def has(self, first: int, end: int) -> bool:
        """Whether all of these bytes are present."""
        if self.ledger is None or first >= end:
            return False
        part = self.ledger.part
        return all(each in self.ledger.full for each in range(first // part, -(-end // part)))


class RebuiltArchive(NamedTuple):
    """An archive that is reassembled from its extracted files."""

    recipe: Recipe
    files: Path

    @property
    def size(self) -> int:
        """Size of the archive."""
        return self.recipe.size


class BlobOffers:
    """The offers of one store. `private`: also serve content fetched with a login or being fetched."""

    def __init__(self, layout: StoreLayout, *, private: bool) -> None:
        self.private = private
        self._layout = layout
        self._disk = Disk()
        self._public: dict[tuple[str, str], bool] = {}
        """(room, digest) of all content of Copies -> whether a Copy with it was fetched without a login."""
        self._archives: dict[tuple[str, str], Path] = {}
        """(room, digest) of archives -> the folder of a Copy extracted from it."""
        self._looked_s = float("-inf")

    def blob(self, room: str, digest: Digest) -> CompleteBlob | PartialBlob | RebuiltArchive | None:
        """Return a blob; None if it is absent or may not be served. Blocks briefly."""
        if not ORIGIN_FOLDER.fullmatch(room) or not (self.private or self.public(room, digest)):
            return None
        found = _whole(self._layout.blobs / room / digest_file_name(digest)) or self._rebuilt(room, digest)
        if found is not None or not self.private:
            return found
        for folder in self._pulls(room):
            for place in (folder, folder / "archives"):
                found = _whole(place / digest_file_name(digest))
                if found is not None:
                    return found
        return next(filter(None, (self._coming(folder / FOLDER, digest) for folder in self._pulls(room))), None)

    def public(self, room: str, digest: Digest) -> bool:
        """Whether a Copy with this content was fetched without a login. Blocks briefly."""
        self._look()
        return self._public.get((room, digest), False)

    def _rebuilt(self, room: str, digest: Digest) -> RebuiltArchive | None:
        self._look()
        copy = self._archives.get((room, digest))
        opened = None if copy is None else _opened(copy / RECIPES / digest_file_name(digest))
        if copy is None or opened is None:
            return None
        number, said = opened
        try:
            if said.st_size > RECIPE_BYTES_MAX:
                return None
            recipe = decode_recipe(os.pread(number, said.st_size, 0))
        finally:
            os.close(number)
        return None if recipe is None else RebuiltArchive(recipe, copy / "files")

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        public, archives = dict[tuple[str, str], bool](), dict[tuple[str, str], Path]()
        for record in self._layout.records():
            room, copy = record.key.room, self._layout.copy(record.key)
            for digest in (*(one.digest for one in record.files), *record.documents):
                public[room, digest] = public.get((room, digest), False) or not record.private
            archives.update(((room, one.digest), copy) for one in record.files if one.encoding == "tar")
        self._public, self._archives, self._looked_s = public, archives, now_s

    def _pulls(self, room: str) -> Iterator[Path]:
        for one in list_entries(self._layout.partials):
            if one.name.startswith(f"{room}-"):
                yield Path(one.path) / "blobs"

    def _coming(self, folder: Path, digest: Digest) -> PartialBlob | None:
        opened = _opened(folder / digest)
        if opened is None:
            return None
        number, said = opened
        try:
            text = (folder / f"{digest}.parts").read_bytes()
        except OSError:
            text = b""
        ledger = progress_file.parse_progress(text, digest, said.st_size, self._disk.boot)
        return PartialBlob(number, said.st_size, ledger, fetching=time.time() - said.st_mtime < FETCHING_S)


def _whole(path: Path) -> CompleteBlob | None:
    opened = _opened(path)
    return None if opened is None else CompleteBlob(opened[0], opened[1].st_size)


def _opened(path: Path) -> tuple[int, os.stat_result] | None:
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    said = os.fstat(number)
    if not stat.S_ISREG(said.st_mode):
        os.close(number)
        return None
    return number, said
