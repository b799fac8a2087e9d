"""Request arrivals: those of GenTD26 with all days overlaid, or generated ones with similar properties.

GenTD26 (Alibaba, cluster-trace-v2026-GenAI, `lora_request_trace.csv`) has 26,823 requests for 87 models over 24 days of
a part of a service. Its days are overlaid by time of day, so that the load is that of a whole cluster while the daily
profile and the bursts are kept. A request of the trace occupies a slot for its recorded duration.
"""

from __future__ import annotations

import csv
import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

FILE = "lora_request_trace.csv"


class Arrival(NamedTuple):
    """One request: arrival time, time on a slot, model."""

    at_s: float
    takes_s: float
    model: str


def gentd26(folder: Path, days: int | None = None) -> list[Arrival]:
    """Requests of the trace in a folder, from midnight on. `days`: only that many of the busiest days; None: all.

    Raises FileNotFoundError, and ValueError if the file has another format.
    """
    by_day: dict[int, list[Arrival]] = defaultdict(list)
    with (folder / FILE).open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                at = datetime.fromisoformat(row["gmt_create"])
                takes_s, model = (
                    float(row["exec_time_seconds"]),
                    row["checkpoint_model_version_id"].lower() or "unnamed",
                )
            except (KeyError, TypeError) as error:
                raise ValueError(f"{FILE} is not that of GenTD26: {error}") from None
            midnight = at.replace(hour=0, minute=0, second=0)
            by_day[at.toordinal()].append(Arrival((at - midnight).total_seconds(), takes_s, model))
    chosen = sorted(by_day, key=lambda day: (-len(by_day[day]), day))[:days]
    return sorted(one for day in chosen for one in by_day[day])


def made(seed: int, *, long_s: float = 5400.0, mean: float = 3.0, models: int = 6) -> list[Arrival]:
    """Similar generated arrivals: few Models get most requests, one sends several in a row, and there are surges."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    at_s, takes = 0.0, 28.0
    while at_s < long_s:
        surges = 3.0 if int(at_s / 900.0) % 3 == 1 else 0.5
        at_s += rng.expovariate(mean * surges / takes / 3.0)
        name = f"m{min(int(rng.paretovariate(0.9)) - 1, models - 1)}"
        found += [Arrival(at_s + n, rng.lognormvariate(3.1, 0.6), name) for n in range(rng.randint(1, 5))]
    return sorted(found)


def peak(calls: Iterable[Arrival]) -> int:
    """Maximum number of concurrent requests if none had to wait."""
    ends: list[float] = []
    most = 0
    for one in calls:
        while ends and ends[0] <= one.at_s:
            heapq.heappop(ends)
        heapq.heappush(ends, one.at_s + one.takes_s)
        most = max(most, len(ends))
    return most


def names(calls: Sequence[Arrival]) -> list[str]:
    """Names of the Models, most requested first."""
    return [name for name, _ in Counter(one.model for one in calls).most_common()]
