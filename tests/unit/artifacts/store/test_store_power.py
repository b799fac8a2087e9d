"""Power loss at any step of a store: every Copy that exists afterwards is complete and has its name.

This includes unsynced Copies: one that may not have reached the disk is not trusted after the next boot.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from artifacts.store.publish import Job
from artifacts.store.store import Store
from tests.support.harness.artifacts.weight_store import KIB, content, fetching, raw, wanted, whole
from tests.support.harness.faults.power_loss import ForgetfulDisk, PowerLossError

ONE = wanted("a", raw("x"), raw("y", path="sub/y.gguf"))
TWO = wanted("b", raw("y", path="y.gguf"), raw("z"))
BOTH = {
    ONE.reference: {"x.gguf": content("x", KIB), "sub/y.gguf": content("y", KIB)},
    TWO.reference: {"y.gguf": content("y", KIB), "z.gguf": content("z", KIB)},
}
STRIDE = 4


async def _life(root: Path, forgetful: ForgetfulDisk, settled: int) -> None:
    """Run the store once; `settled` is the number of Copies after which their bytes are synced."""
    known = fetching(ONE, TWO)

    async def fetch(job: Job) -> None:
        for one in job.files:
            aside = job.blobs / "aside"
            aside.write_bytes(content(*known.known[one.digest]))
            job.disk.sync(aside)
            job.disk.move(aside, job.blob(one.digest))

    store = Store(root, spare_bytes=0, disk=forgetful.disk).open()
    with pytest.MonkeyPatch.context() as patch:
        if settled > 1:
            patch.setattr(store, "settle_soon", lambda: None)
        (await store.ensure(ONE, fetch, None)).close()
    await store.settled()
    (await store.ensure(TWO, fetch, None)).close()
    await store.settled()
    store.evict(ONE.key)


@pytest.mark.point("13")
@pytest.mark.parametrize(
    ("boot", "settled"), [("", 0), (None, 1), (None, 2)], ids=["at once", "one by one", "both in the end"]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, STRIDE))])
async def test_power_loss_at_any_step_exposes_no_incomplete_copy(
    tmp_path: Path, seed: int, boot: str | None, settled: int
) -> None:
    seen = set[tuple[str, ...]]()
    for steps in range(seed, 1000, STRIDE):
        root, after, lost = tmp_path / f"{steps}", tmp_path / f"{steps}-after", False
        root.mkdir()
        forgetful = ForgetfulDisk(root, steps, boot)
        try:
            await _life(root, forgetful, settled)
        except PowerLossError:
            lost = True
        forgetful.after(after, Random(steps))
        forgetful.close()
        store, fetch = Store(after, spare_bytes=0).open(), fetching(ONE, TWO)
        published = whole(store)
        assert published.items() <= BOTH.items(), steps
        seen.add(tuple(sorted(published)))
        for one in (ONE, TWO):
            (await store.ensure(one, fetch, None)).close()
        assert whole(store) == BOTH, steps
        if not lost:
            assert steps > 60
            assert seen >= {(), (TWO.reference,)} | ({(ONE.reference,)} if settled < 2 else set())
            return
