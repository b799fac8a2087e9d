"""docs/reference/clients.md is generated from the facts and the record of the client matrix, which are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import clients
from tests.clients import record
from tests.clients.matrix import BEHAVIOURS, HERE, load

PASSED = [
    f"tests/clients/test_matrix.py::test_it[{name}-{one}]@clients 1" for name, one in sorted(record.cells(load()))
]
"""The IDs of all tests of the matrix, as xdist reports them."""


def shows_its_lines(link: str) -> bool:
    """Whether a link to a file of GitHub has a fixed commit and lines. Other links need neither."""
    is_file = re.match(r"https://github\.com/[^/]+/[^/]+/(?!issues/|pull/|discussions/)", link) is not None
    lines = r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/[^#?]+#L\d+(?:-L\d+)?"
    return re.fullmatch(lines, link) is not None or (link.startswith("https://") and not is_file)


def test_client_table_page_equals_the_generated_one() -> None:
    assert clients.PAGE.read_text() == clients.page(clients.PAGE.read_text()), "run `.venv/bin/python -m docs.clients`"


def test_each_folder_of_a_client_is_in_the_matrix() -> None:
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {client.name for client in load()}


def test_each_missing_behaviour_has_a_reason_and_a_link() -> None:
    for client in load():
        for behaviour, remark in {**client.without, **client.notes}.items():
            assert behaviour in BEHAVIOURS
            assert remark.text
            assert shows_its_lines(remark.link), f"{client.name}, {behaviour}: add a fixed commit and #L"


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (f"https://github.com/a/b/blob/{'0' * 40}/c/d.py#L12", True),
        (f"https://github.com/a/b/blob/{'0' * 40}/c/d.py#L12-L20", True),
        ("https://github.com/a/b/issues/1", True),
        ("https://docs.example.com/page", True),
        (f"https://github.com/a/b/blob/{'0' * 40}/c/d.py", False),
        ("https://github.com/a/b/blob/main/c/d.py#L12", False),
        ("https://github.com/a/b/blob/v1.0/c/d.py#L12", False),
        ("https://github.com/a/b/tree/main/c", False),
        ("http://docs.example.com/page", False),
    ],
)
def test_link_to_a_file_needs_a_fixed_commit_and_lines(link: str, expected: bool) -> None:
    assert shows_its_lines(link) is expected


def test_each_tested_behaviour_has_a_recorded_pass_of_the_locked_version() -> None:
    passes = record.recorded()
    lacking = [
        f"{client.name} {client.version} {behaviour}"
        for client in load()
        for behaviour in BEHAVIOURS
        if behaviour not in client.without and not record.has_passed(client, behaviour, passes)
    ]
    assert not lacking, "run `make test-clients`, then `.venv/bin/python -m docs.clients record`"


def test_table_shows_yes_only_for_recorded_passes_of_the_locked_version() -> None:
    first, second = load()[:2]
    passes = {
        first.name: record.Passes(first.version, frozenset({"chat"})),
        second.name: record.Passes("0.0.1", frozenset(BEHAVIOURS)),
    }
    rows = [line.split(" | ") for line in clients.table(passes).splitlines()]
    row = next(row for row in rows if row[0] == f"| {first.title}")
    assert [cell.strip(" |") for cell in row[2:]] == [
        "yes" if behaviour == "chat" else "not tested" for behaviour in BEHAVIOURS
    ]
    assert sum(cell.startswith("yes") for row in rows for cell in row) == 1


def test_complete_run_records_counts_versions_and_passes() -> None:
    failed = [name for name in PASSED if "[openai_node-chat]" in name]
    found = record.results({"passed": [name for name in PASSED if name not in failed], "failed": failed})
    run = record.run_of(load(), found)
    assert run is not None
    limited = sum(len(client.without) for client in load())
    assert (run["passed"], run["limited"], run["failed"]) == (len(PASSED) - 1, limited, 1)
    clients_of_run = run["clients"]
    assert isinstance(clients_of_run, dict)
    node = next(client for client in load() if client.name == "openai_node")
    assert clients_of_run["openai_node"] == {
        "version": node.version,
        "passed": [behaviour for behaviour in BEHAVIOURS if behaviour != "chat"],
    }


def test_run_of_a_part_of_the_matrix_is_not_saved() -> None:
    assert record.run_of(load(), record.results({"passed": PASSED[1:]})) is None
    assert record.run_of(load(), record.results({"passed": PASSED[1:], "skipped": PASSED[:1]})) is None


def test_failed_teardown_makes_a_passed_cell_failed() -> None:
    ((cell, result),) = record.results({"passed": PASSED[:1], "error": PASSED[:1]}).items()
    assert (f"[{'-'.join(cell)}]" in PASSED[0], result) == (True, "failed")


def test_recorded_passes_equal_those_of_the_copied_run(tmp_path: Path) -> None:
    run, copy = tmp_path / "run.json", tmp_path / "passes.tsv"
    run.write_text(json.dumps(record.run_of(load(), record.results({"passed": PASSED}))))
    record.copy_passes(run, copy)
    passes = record.recorded(copy)
    assert all(
        record.has_passed(client, behaviour, passes) == (behaviour not in client.without)
        for client in load()
        for behaviour in BEHAVIOURS
    )


def test_client_that_shows_no_error_code_has_a_remark() -> None:
    for client in load():
        assert (client.error_shows == "model_not_found") != ("error" in client.notes), client.name


def test_client_lock_files_pin_hashes_and_name_no_registry() -> None:
    for path in HERE.glob("*/requirements.txt"):
        requirements = [line for line in path.read_text().splitlines() if "==" in line]
        assert requirements
        assert path.read_text().count("--hash=sha256:") >= len(requirements), path
        assert "://" not in path.read_text()
    for path in HERE.glob("*/package-lock.json"):
        packages = json.loads(path.read_text())["packages"]
        assert all("resolved" not in package for package in packages.values()), path
        assert all("integrity" in package for name, package in packages.items() if name), path
