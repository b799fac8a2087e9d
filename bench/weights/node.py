"""One process of a node that needs weights: `python -m bench.weights.node REFERENCE STORE`.

Prints `ready` and waits for a line. Then a Supply fetches the weights as for the start of a replica, and again for
later replicas. Prints the durations as JSON; `more_ms` are the durations for the later replicas.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from autoscaler.spec.model import Model
from autoscaler.spec.settings import Weights
from bench import documents
from bench.kit import model_of
from bench.weights.cost import Cost
from pilotlight.models.weights_fetch import Supply

MORE = 20


async def _want(reference: str, store: Path) -> None:
    model = model_of(documents.model("wanted", engine="llama.cpp", artifact=f"oci://{reference}"))
    supply = Supply(store, Weights())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    cost = Cost()
    first_ms = await _once(supply, model)
    more_ms = [await _once(supply, model) for _ in range(MORE)]
    cost.report(first_ms=first_ms, more_ms=more_ms)


async def _once(supply: Supply, model: Model) -> float:
    begun_s = time.perf_counter()
    coming = supply(model, lambda _: None)
    if coming is None:
        raise RuntimeError("the store does not fetch these weights")
    held = await coming
    took_ms = (time.perf_counter() - begun_s) * 1e3
    held.close()
    return took_ms


if __name__ == "__main__":
    asyncio.run(_want(sys.argv[1], Path(sys.argv[2])))
