"""API keys: strong, shown once, stored as hashes only, in a file that only its owner can read."""

from __future__ import annotations

import fcntl
import hashlib
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest

from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.local import state_directory
from autoscaler.spec.yaml import parse_yaml
from pilotlight.cli import keys
from pilotlight.models.document_loading import KEYS_FILE


def test_new_key_is_random_and_its_entry_contains_its_hash() -> None:
    made = {keys.generate_key("tenant", "ci")[0] for _ in range(50)}
    assert len(made) == 50
    assert all(key.startswith("pl-") and len(key) >= 46 for key in made)
    key, entry = keys.generate_key("viewer", "ci")
    assert entry.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert (entry.name, entry.role) == ("ci", "viewer")
    assert (entry.created_at or "").endswith("Z")


def test_printed_key_line_is_valid_in_a_tenant_document() -> None:
    _, entry = keys.generate_key("tenant", "ci")
    text = "apiVersion: pilotlight.dev/v1alpha1\nkind: Tenant\nmetadata: {name: acme}\nspec:\n  keys:\n  "
    (tenant,) = parse_documents([("x", text + keys.entry_yaml(entry) + "\n")]).tenants
    assert tenant.spec.keys == (entry,)


def test_stored_keys_are_grouped_by_tenant_in_a_file_of_mode_0600(tmp_path: Path) -> None:
    entries = [keys.generate_key("tenant", name) for name in ("one", "two", "three")]
    for (_, entry), tenant in zip(entries, ("acme", "acme", "lab"), strict=True):
        path = keys.store_key(tmp_path / "new", tenant, entry)
    assert path == tmp_path / "new" / KEYS_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    text = path.read_text()
    assert not any(key in text for key, _ in entries)
    tenants = parse_documents([("x", text)]).tenants
    assert [(tenant.name, [key.name for key in tenant.spec.keys]) for tenant in tenants] == [
        ("acme", ["one", "two"]),
        ("lab", ["three"]),
    ]


@pytest.mark.standard
def test_keys_that_two_processes_store_at_once_are_all_kept(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pilotlight.cli import keys\n"
        "sys.stdin.readline()\n"
        "for n in range(8):\n"
        "    entry = keys.generate_key('tenant', f'{sys.argv[2]}{n}')[1]\n"
        "    keys.store_key(Path(sys.argv[1]), 'acme', entry)\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "new"), name], stdin=subprocess.PIPE)
        for name in ("a", "b")
    ]
    for one in both:
        assert one.stdin is not None
        one.stdin.write(b"go\n")
        one.stdin.flush()
    assert [one.wait(30) for one in both] == [0, 0]
    for one in both:
        assert one.stdin is not None
        one.stdin.close()
    (tenant,) = parse_documents([("x", (tmp_path / "new" / KEYS_FILE).read_text())]).tenants
    assert sorted(key.name for key in tenant.spec.keys) == sorted(f"{who}{n}" for who in "ab" for n in range(8))


def test_storing_a_key_times_out_if_another_process_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "LOCK_S_MAX", 0.05)
    with (tmp_path / keys.LOCK_FILE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(click.ClickException, match=r"another process has locked .*keys\.lock for 0\.05 s"):
            keys.store_key(tmp_path, "acme", keys.generate_key("tenant", "x")[1])
    keys.store_key(tmp_path, "acme", keys.generate_key("tenant", "x")[1])


def test_keys_file_of_another_format_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / KEYS_FILE).write_text("- 1\n")
    with pytest.raises(click.UsageError, match=r"keys\.yaml"):
        keys.store_key(tmp_path, "acme", keys.generate_key("tenant", "x")[1])
    assert (tmp_path / KEYS_FILE).read_text() == "- 1\n"


def test_unwritable_state_directory_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(click.ClickException, match=r"cannot be written: "):
        keys.store_key(tmp_path / "file" / "state", "acme", keys.generate_key("tenant", "x")[1])


def test_keys_over_the_file_limit_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEYS_MAX", 1)
    keys.store_key(tmp_path, "acme", keys.generate_key("tenant", "x")[1])
    with pytest.raises(click.ClickException, match="move them to Tenant documents"):
        keys.store_key(tmp_path, "lab", keys.generate_key("tenant", "y")[1])


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 300])
def test_invalid_tenant_name_is_rejected(name: str) -> None:
    with pytest.raises(click.UsageError, match="--tenant: expected"):
        keys.check_names(name, "key")


@pytest.mark.parametrize("name", ["\udcff", "a\nb", "\x1b[0m", "x" * 101])
def test_unprintable_or_long_key_name_is_rejected(name: str) -> None:
    with pytest.raises(click.UsageError, match="--name: expected printable characters, at most 100"):
        keys.check_names("acme", name)


def test_printed_entry_of_a_key_name_with_quotes_has_no_other_fields() -> None:
    name = 'x", role: "operator", sha256: "' + "a" * 64 + '"} #'
    _, entry = keys.generate_key("tenant", name)
    assert parse_yaml(keys.entry_yaml(entry)) == [[
        {"name": name, "sha256": entry.sha256, "createdAt": entry.created_at, "role": "tenant"}
    ]]  # fmt: skip


def test_serving_pid_is_reported_only_while_the_process_lives(tmp_path: Path) -> None:
    assert state_directory.serving_pid(tmp_path) == ""
    (tmp_path / "lock").write_text("1\n")
    assert state_directory.serving_pid(tmp_path) == "1"
    (tmp_path / "lock").write_text(f"{2**22 + 1}\n")  # above the largest pid
    assert state_directory.serving_pid(tmp_path) == ""
