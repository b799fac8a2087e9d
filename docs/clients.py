"""Generates the table of docs/reference/clients.md: run `python -m docs.clients`.

The remarks are those of tests/clients/clients.toml. A behaviour is `yes` if the record tests/clients/passes.tsv has a
pass of the locked version, otherwise `not tested`. `python -m docs.clients record` first replaces the record by the
last complete run of the client matrix (`make test-clients`). tests/project/test_clients.py checks that the page is
current.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from docs.states import between
from tests.clients.matrix import BEHAVIOURS, Client, load
from tests.clients.record import Passes, copy_passes, has_passed, recorded

PAGE = Path(__file__).parent / "reference" / "clients.md"


def table(passes: Mapping[str, Passes]) -> str:
    """The table, and its remarks."""
    remarks: list[str] = []

    def cell(client: Client, behaviour: str) -> str:
        found = client.without.get(behaviour) or client.notes.get(behaviour)
        word = "yes" if has_passed(client, behaviour, passes) else "not tested"
        word = "n/a" if behaviour in client.without else word
        if found is None:
            return word
        line = f"{found.text} | [source]({found.link}) |"
        if line not in remarks:
            remarks.append(line)
        return f"{word} ({remarks.index(line) + 1})"

    rows = [("client", "version", *BEHAVIOURS.values()), ("---",) * (len(BEHAVIOURS) + 2)]
    rows += [(one.title, one.version, *(cell(one, name) for name in BEHAVIOURS)) for one in load()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "| | remark | source |", "| --- | --- | --- |"]
    lines += [f"| {number} | {remark}" for number, remark in enumerate(remarks, 1)]
    return "\n" + "\n".join(lines) + "\n\n"


def page(text: str) -> str:
    """The page with the current table."""
    return between(text, "clients", table(recorded()))


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        copy_passes()
    PAGE.write_text(page(PAGE.read_text()))
