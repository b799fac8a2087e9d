"""Step `serial`: eight concurrent requests for eight models that together fill the device, and start one by one."""

from __future__ import annotations

import time
from itertools import pairwise

from loadtest.client import Client
from loadtest.result import Ending
from tests.gpu.bed import Bed, shot
from tests.support.harness.serve.serve import Serving

MODELS = 8
TICK_S = 0.02
"""The kernel counts the start of a process in hundredths of a second."""
OUT_OF_MEMORY = ("out of memory", "outofmemory")


async def run(bed: Bed) -> None:
    """Each claims and takes an eighth of the device memory that Pilotlight reports."""
    claim = bed.device_bytes // MODELS
    words = ("--memory-bytes", "{memory_bytes}")
    names = [f"eight-{number}" for number in range(MODELS)]
    documents = [bed.model(name, "small", *words, memory_bytes=claim) for name in names]
    async with bed.serving("serial", *documents) as serve:
        began_s = time.time()
        results = await Client(serve.url).run([shot(name) for name in names])
        lasted_s = time.time() - began_s
        starts = {name: serve.starts(name) for name in names}
        errors = _out_of_memory(serve)
        if errors or any(one.ending is not Ending.COMPLETED for one in results):
            bed.tail(serve)
    intervals = sorted(
        (one.at_s, next((p.at_s for p in bed.phases(began_s, one.model) if p.phase == "listening"), one.at_s))
        for one in bed.spawns(began_s)
    )
    overlaps = sum(after[0] < before[1] - TICK_S for before, after in pairwise(intervals))
    say = bed.report.row
    say("serial", "until all eight were answered", lasted_s, "s")
    say("serial", "the starts themselves, sum", sum(end - begin for begin, end in intervals), "s")
    say("serial", "most memory in use", bed.watch.peak_used(began_s) / (1 << 30), "GiB")
    lost = sum(one.ending is not Ending.COMPLETED for one in results)
    failed = sum(starts.values()) - MODELS
    bed.report.figure("serial", "out-of-memory errors", float(errors), "0", holds=errors == 0)
    bed.report.figure("serial", "failed starts", float(failed), "0", holds=failed == 0)
    bed.report.figure("serial", "requests lost", float(lost), "0", holds=lost == 0)
    bed.report.figure("serial", "starts that overlapped", float(overlaps), "0", holds=overlaps == 0)


def _out_of_memory(serve: Serving) -> int:
    """Number of engine logs with an out-of-memory error."""
    texts = [path.read_text(errors="replace").lower() for path in (serve.state / "logs").glob("*.log")]
    return sum(any(word in text for word in OUT_OF_MEMORY) for text in texts)
