"""A store compared with a model of it: after any sequence of operations it has the same Copies, within the bound."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from artifacts.registry_errors import UnreachableError
from artifacts.store import pull
from artifacts.store.copies import Copy
from artifacts.store.layout import HeldError, NoRoomError
from artifacts.store.pull import CopySpec, Job
from artifacts.store.store import Store
from tests.support.example_budget import examples
from tests.support.harness.artifacts.weight_store import fetching, raw, wanted, whole

UNIT = 64 << 10
RECORD = 32 << 10
"""Small compared with a file, so that a byte without a reservation is detected."""
ARTIFACTS = (
    wanted("a", raw("p", UNIT), raw("q", UNIT)),
    wanted("b", raw("q", UNIT), raw("r", 2 * UNIT)),
    wanted("c", raw("s", UNIT), raw("t", UNIT), raw("u", UNIT)),
    wanted("d", raw("r", 2 * UNIT), raw("s", UNIT)),
)
BYTES_MAX = 6 * UNIT + RECORD
some = st.sampled_from(ARTIFACTS)


def blobs(*of: CopySpec) -> dict[str, int]:
    return {file.digest: file.size for one in of for file in one.files}


def on_disk(root: Path) -> int:
    """Bytes of all files, each counted once whatever its number of names."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            reported = Path(folder, name).lstat()
            found[reported.st_ino] = reported.st_blocks * 512
    return sum(found.values())


class Machine(RuleBasedStateMachine):
    """`here`, `pins` and `used` are the expected state."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pull, "RECORD_BYTES", RECORD)
        self.root = Path(tempfile.mkdtemp())
        self.here: dict[str, CopySpec] = {}
        self.pins: set[str] = set()
        self.used: dict[str, list[Copy]] = {}
        self.open_again()

    def teardown(self) -> None:
        for copies in self.used.values():
            for copy in copies:
                copy.close()
        shutil.rmtree(self.root)
        self.patch.undo()

    @rule()
    def open_again(self) -> None:
        self.store = Store(self.root, bytes_max=BYTES_MAX, spare_bytes=0).open()

    def held(self, one: CopySpec) -> bool:
        return one.key.digest in self.pins or bool(self.used.get(one.reference))

    @rule(one=some, breaks=st.booleans())
    def ensure(self, one: CopySpec, breaks: bool) -> None:
        fetch = fetching(one)
        fetch.fails = UnreachableError("registry.example: does not answer") if breaks else None

        async def bounded(job: Job) -> None:
            try:
                await fetch(job)
            finally:
                assert on_disk(self.root) <= BYTES_MAX

        kept = {name: there for name, there in self.here.items() if self.held(there)}
        here = blobs(*self.here.values())
        own = {name: size for name, size in blobs(one).items() if name in here}
        floor = sum((blobs(*kept.values()) | own).values())
        needed = sum(size for name, size in blobs(one).items() if name not in here) + RECORD
        try:
            copy = asyncio.run(self.store.ensure(one, bounded, None))
        except NoRoomError:
            assert one.reference not in self.here
            assert floor + needed > BYTES_MAX
        except UnreachableError:
            assert breaks
            assert one.reference not in self.here
        else:
            assert one.reference in self.here or floor + needed <= BYTES_MAX
            self.used.setdefault(one.reference, []).append(copy)
            kept[one.reference] = one
        there = whole(self.store)
        assert kept.keys() <= there.keys() <= self.here.keys() | kept.keys()
        self.here = {each.reference: each for each in ARTIFACTS if each.reference in there}

    @precondition(lambda self: any(self.used.values()))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, copies in self.used.items() if copies)))
        self.used[name].pop().close()

    @rule(one=some)
    def pin(self, one: CopySpec) -> None:
        self.store.pin(one.key.digest)
        self.pins.add(one.key.digest)

    @rule(one=some)
    def unpin(self, one: CopySpec) -> None:
        self.store.unpin(one.key.digest)
        self.pins.discard(one.key.digest)

    @rule(one=some)
    def evict(self, one: CopySpec) -> None:
        if self.held(one) and (one.reference in self.here or one.key.digest in self.pins):
            with pytest.raises(HeldError):
                self.store.evict(one.key)
        else:
            self.store.evict(one.key)
            self.here.pop(one.reference, None)

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        rows = {row.record.reference: row for row in self.store.rows()}
        assert rows.keys() == self.here.keys()
        for name, row in rows.items():
            assert row.pinned == (self.here[name].key.digest in self.pins)
            assert row.in_use == bool(self.used.get(name))
        assert all(
            set(files) == {file.path for file in self.here[name].files} for name, files in whole(self.store).items()
        )
        assert on_disk(self.root) <= BYTES_MAX
        if not list(self.store.layout.partials.iterdir()):
            assert self.store.stored_bytes() == sum(blobs(*self.here.values()).values())


Machine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=20, deadline=None)
TestStore = Machine.TestCase
