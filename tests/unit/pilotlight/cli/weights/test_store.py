"""`pilotlight weights` for the copies on a node: arguments and output."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from artifacts.store.store import Row, Store
from pilotlight.cli.main import cli
from pilotlight.cli.weights import store as stored
from tests.support.harness.artifacts.weight_store import KIB, fetching, raw, wanted

ONE, TWO = wanted("a", raw("x"), raw("shared")), wanted("b", raw("shared"), raw("y", 3 * KIB))
SHORT = ONE.key.digest[: len("sha256:") + 12]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "weights", spare_bytes=0).open()
    fetch = fetching(ONE, TWO)
    for one in (ONE, TWO):
        asyncio.run(found.ensure(one, fetch, None)).close()
    return found


def run(store: Store, *words: str) -> Result:
    return CliRunner().invoke(cli, ["weights", *words, "--store", str(store.layout.root)], prog_name="pilotlight")


def left(store: Store) -> list[str]:
    return sorted(row.record.reference for row in store.rows())


def test_ls_lists_copies_with_size_age_and_whether_in_use_or_pinned(store: Store) -> None:
    store.pin(TWO.key.digest)
    copy = store.find(ONE.key)
    assert copy is not None
    with copy:
        lines = run(store, "ls").output.splitlines()
    assert lines[0].split() == ["artifact", "digest", "size", "age", "last", "used", "held"]
    first = next(line for line in lines if line.startswith(ONE.reference + " "))
    assert first.split()[:3] == [ONE.reference, SHORT, "2Ki"]
    assert first.endswith("in use")
    assert next(line for line in lines if line.startswith(TWO.reference)).rstrip().endswith("pinned")
    assert lines[-1] == "2 Copies, 5Ki with shared files counted once"


def test_ls_with_json_output_lists_each_stored_copy(store: Store) -> None:
    found = {row["artifact"]: row for row in json.loads(run(store, "ls", "--output", "json").output)}
    assert set(found) == {ONE.reference, TWO.reference}
    row = found[TWO.reference]
    assert (row["digest"], row["bytes"], row["files"]) == (TWO.key.digest, 4 * KIB, 2)
    assert (row["pinned"], row["in_use"], row["private"]) == (False, False, False)


@pytest.mark.parametrize("name", [ONE.reference, ONE.key.digest, SHORT, SHORT.partition(":")[2][:6]])
def test_copy_is_found_by_reference_or_digest(store: Store, name: str) -> None:
    assert run(store, "pin", name).output == f"{SHORT} is pinned\n"
    refused = run(store, "evict", name)
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert "is pinned: `pilotlight weights unpin` first" in refused.stderr
    assert run(store, "unpin", name).output == f"{SHORT} may be evicted when space is needed\n"
    assert run(store, "evict", name).output == f"{ONE.reference}: {SHORT} is evicted\n"
    assert left(store) == [TWO.reference]


def test_evict_by_reference_keeps_same_digest_of_other_registries(store: Store) -> None:
    there = wanted("a", raw("x"), raw("shared"), origin="other.example")
    asyncio.run(store.ensure(there, fetching(there), None)).close()
    read = json.loads(run(store, "verify", there.reference, "--output", "json").output)
    assert [one["artifact"] for one in read] == [there.reference]
    assert run(store, "evict", ONE.reference).exit_code == 0
    assert left(store) == sorted([there.reference, TWO.reference])
    asyncio.run(store.ensure(ONE, fetching(ONE), None)).close()
    assert run(store, "evict", SHORT).exit_code == 0
    assert left(store) == [TWO.reference]


def test_ls_wraps_instead_of_truncating_on_a_narrow_terminal(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pin(ONE.key.digest)
    narrow = io.StringIO()
    monkeypatch.setattr(stored, "build_console", lambda: Console(file=narrow, width=64))
    run(store, "ls")
    lines = narrow.getvalue().splitlines()
    assert lines[0].split() == ["artifact", "digest", "size", "age", "last", "used", "held"]
    assert max(map(len, lines)) <= 64
    assert "…" not in narrow.getvalue()
    assert "".join(line.split("  ")[0].strip() for line in lines[1:]).count(ONE.reference) == 1


def test_verify_of_an_empty_store_prints_a_notice(tmp_path: Path) -> None:
    empty = Store(tmp_path / "empty", spare_bytes=0).open()
    assert run(empty, "verify").output == "the store has no copies\n"
    assert run(empty, "verify", "--output", "json").output == "[]\n"


def test_evict_frees_the_requested_size_or_nothing(store: Store) -> None:
    store.pin(ONE.key.digest)
    refused = run(store, "evict", "--free", "4Ki")
    assert (refused.exit_code, len(left(store))) == (1, 2)
    assert "nothing was evicted: 1Ki could not be freed, with 0 bytes in use and 2Ki pinned" in refused.stderr
    assert run(store, "evict", "--free", "3Ki").output == "evicted: 1, freed: 3Ki\n"
    assert left(store) == [ONE.reference]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("evict",), "expected either names of copies or --free SIZE"),
        (("evict", "--free", "much"), "--free much: expected a size such as 16Gi"),
        (("evict", "oci://nowhere.io/a"), "'oci://nowhere.io/a': matches no copy"),
        (("pin", "abc"), "'abc': matches no copy"),
    ],
)
def test_usage_error_of_a_weights_command_is_one_line(store: Store, words: tuple[str, ...], message: str) -> None:
    result = run(store, *words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_pin_of_a_digest_not_yet_pulled_is_stored(store: Store) -> None:
    digest = wanted("later").key.digest
    assert run(store, "pin", digest).exit_code == 0
    assert store.layout.pin(digest).exists()
    refused = run(store, "evict", digest)
    assert (refused.exit_code, "at least one of the names matches no copy" in refused.stderr) == (1, True)


def test_directory_without_a_store_is_rejected_unchanged(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["weights", "ls", "--store", str(tmp_path)], prog_name="pilotlight")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "no weights store exists there" in result.stderr


def test_unreadable_store_is_a_one_line_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_self: Store) -> list[Row]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Store, "rows", refuses)
    result = run(store, "ls")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "Permission denied; run the command as the owner of the store" in result.stderr
