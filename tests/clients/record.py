"""The record of the client matrix: the behaviours that each client passed, and the tested version.

A complete run of the matrix writes RUN; a run of a part does not. `python -m docs.clients record` copies the passes of
RUN to RECORD, which is committed. docs/clients.py writes `yes` only for behaviours in RECORD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from tests.clients.matrix import BEHAVIOURS, HERE, ROOT, Client, load

RUN = ROOT / "build" / "client-matrix.json"
RECORD = HERE / "passes.tsv"
HEAD = ("client", "version", "passed behaviours")

Cell: TypeAlias = tuple[str, str]
"""A client and a behaviour."""
Result: TypeAlias = Literal["passed", "failed"]


class Passes(NamedTuple):
    """The behaviours that one client passed."""

    version: str
    behaviours: frozenset[str]


def cells(clients: Iterable[Client]) -> set[Cell]:
    """The cells that have a test: each behaviour except those that the client does not have."""
    return {(client.name, one) for client in clients for one in BEHAVIOURS if one not in client.without}


def results(ended: Mapping[str, Iterable[str]]) -> dict[Cell, Result]:
    """Return the result of each cell that ran. `ended`: the IDs of tests by the outcomes of pytest.

    A cell whose set-up or tear-down failed has failed. A skipped cell did not run. xdist appends its group to IDs.
    """
    found: dict[Cell, Result] = {}
    outcomes: tuple[tuple[str, Result], ...] = (("passed", "passed"), ("failed", "failed"), ("error", "failed"))
    for outcome, result in outcomes:
        for name in ended.get(outcome, ()):
            case = re.search(r"/test_matrix\.py::.*\[(\w+)-(\w+)\]", name)
            if case is not None:
                found[case[1], case[2]] = result
    return found


def run_of(clients: Iterable[Client], found: Mapping[Cell, Result]) -> dict[str, object] | None:
    """Return the content of RUN: its counts, and the passes of each client. None if a cell did not run."""
    clients = list(clients)
    if not cells(clients) <= found.keys():
        return None
    passes = {
        client.name: {
            "version": installed_version(client),
            "passed": [one for one in BEHAVIOURS if found.get((client.name, one)) == "passed"],
        }
        for client in clients
    }
    passed = sum(result == "passed" for result in found.values())
    limited = sum(len(client.without) for client in clients)
    return {"passed": passed, "limited": limited, "failed": len(found) - passed, "clients": passes}


def installed_version(client: Client) -> str:
    """The version that the test used. Clients with an installation of their own have the locked one."""
    return metadata.version(client.package) if client.is_standard else client.version


def save_run(ended: Mapping[str, Iterable[str]]) -> None:
    """Write RUN if all cells ran."""
    run = run_of(load(), results(ended))
    if run is not None:
        RUN.parent.mkdir(exist_ok=True)
        RUN.write_text(json.dumps(run))


def copy_passes(run: Path = RUN, record: Path = RECORD) -> None:
    """Replace the record by the passes of the last complete run. Raises FileNotFoundError without such a run."""
    clients = json.loads(run.read_text())["clients"]
    rows = [HEAD, *((name, one["version"], " ".join(one["passed"])) for name, one in clients.items())]
    record.write_text("".join("\t".join(row) + "\n" for row in rows))


def recorded(record: Path = RECORD) -> dict[str, Passes]:
    """The recorded passes by client."""
    rows = [line.split("\t") for line in record.read_text().splitlines()[1:]]
    return {name: Passes(version, frozenset(behaviours.split())) for name, version, behaviours in rows}


def has_passed(client: Client, behaviour: str, passes: Mapping[str, Passes]) -> bool:
    """Whether the locked version of the client passed."""
    found = passes.get(client.name)
    return found is not None and found.version == client.version and behaviour in found.behaviours
