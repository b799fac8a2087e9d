"""docs/reference/clients.md is generated from the facts of the client matrix, which are complete."""

from __future__ import annotations

import json

from docs import clients
from tests.clients.matrix import BEHAVIOURS, HERE, load


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
            assert remark.link.startswith("https://"), f"{client.name}: {behaviour}"


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
