"""Generates the table of docs/reference/clients.md: `.venv/bin/python -m docs.clients`.

The facts are those of the test: tests/clients/clients.toml. tests/project/test_clients.py compares the page with what
this module would write.
"""

from __future__ import annotations

from pathlib import Path

from docs.states import between
from tests.clients.matrix import BEHAVIOURS, Client, load

PAGE = Path(__file__).parent / "reference" / "clients.md"


def table() -> str:
    """The table, and its remarks."""
    remarks: list[str] = []

    def cell(client: Client, behaviour: str) -> str:
        found = client.without.get(behaviour) or client.notes.get(behaviour)
        word = "n/a" if behaviour in client.without else "yes"
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
    return between(text, "clients", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
