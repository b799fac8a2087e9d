"""Alibaba's cluster trace of 2023 as the packing experiment reads it: nodes, and requests by kind.

The form of the CSV files is in data/openb/NOTE.md: some workloads have five columns only; `gpu_milli` is per GPU and at
most 1000. Nodes and pods are returned in the order of their names, from which the experiment shuffles.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

PREFIX = "openb_pod_list_"
NODES = "openb_node_list_gpu_node.csv"
MILLI = 1000
"""The milli of a whole GPU."""


class NodeRow(NamedTuple):
    """One node: CPU in thousandths of a core, memory in MiB."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


class Kind(NamedTuple):
    """The properties that decide where a request fits: CPU, memory, number and models of GPUs, `milli` of each."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    milli: int
    models: frozenset[str]
    """Empty: any model."""

    @property
    def shares(self) -> bool:
        """Return whether it uses a part of one GPU."""
        return self.gpus == 1 and self.milli < MILLI

    @property
    def total_milli(self) -> int:
        """Return the milli of all its GPUs."""
        return self.gpus * self.milli


def read_nodes(path: Path) -> list[NodeRow]:
    """Read the nodes. Raises OSError, and ValueError with the file, the line and the problem."""
    rows = [
        NodeRow(name, of("cpu_milli"), of("memory_mib"), of("gpu"), row.get("model") or "")
        for name, row, of in _rows(path, "sn")
    ]
    return sorted(rows)


def read_pods(path: Path) -> list[Kind]:
    """Read the pods, by name. Raises OSError, and ValueError with the file, the line and the problem."""
    kinds: dict[str, Kind] = {}
    for name, row, of in _rows(path, "name"):
        gpus = of("num_gpu")
        milli = min(of("gpu_milli"), MILLI) if gpus else 0
        if gpus and not milli:
            raise ValueError(f"{path}: {name}: gpu_milli is 0: expected 1 or more for a pod with GPUs")
        models = frozenset(filter(None, (row.get("gpu_spec") or "").split("|"))) if gpus else frozenset()
        kinds[name] = Kind(of("cpu_milli"), of("memory_mib"), gpus, milli, models)
    return [kinds[name] for name in sorted(kinds)]


def _rows(path: Path, key: str) -> Iterator[tuple[str, dict[str, str], Callable[[str], int]]]:
    """Yield (name, row, its amounts by column); names are unique."""
    seen: set[str] = set()
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            at = f"{path}: line {reader.line_num}"
            name = row.get(key) or ""
            if not name or name in seen:
                raise ValueError(f"{at}: {key}: expected a name, each once, got {name[:80]!r}")
            seen.add(name)
            yield name, row, partial(_amount, at, row)
    if not seen:
        raise ValueError(f"{path}: the file is empty")


def _amount(at: str, row: dict[str, str], column: str) -> int:
    text = row.get(column) or ""
    if not re.fullmatch("[0-9]{1,12}", text):
        raise ValueError(
            f"{at}: {column}: expected a whole number, 0 or more and of 12 digits at most, got {text[:80]!r}"
        )
    return int(text)


def workloads(folder: Path) -> dict[str, list[Kind]]:
    """Return all workloads of the folder by name."""
    files = sorted(folder.glob(f"{PREFIX}*.csv"))
    return {file.stem.removeprefix(PREFIX): read_pods(file) for file in files}


def capacity_milli(nodes: Sequence[NodeRow]) -> int:
    """Return the GPU milli of all nodes."""
    return sum(node.gpus for node in nodes) * MILLI
