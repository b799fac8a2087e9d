"""`pilotlight weights login` and `logout`: arguments and output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pilotlight.cli.main import cli
from tests.support.builders.artifacts import packed_models

pytestmark = pytest.mark.standard


def run(*words: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["weights", *words], input=typed, prog_name="pilotlight")


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    return tmp_path / "auth.json"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    """A registry that requires no login."""
    packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout")
    with packed_models.served(tmp_path / "layout") as host:
        yield host


@pytest.mark.parametrize(
    ("words", "typed", "message"),
    [
        (["reg.example", "--password-stdin"], "pw", "--password-stdin requires --username"),
        (["reg.example", "-u", "me"], "pw", "cannot prompt for the password without a terminal"),
        (["reg.example", "-u", "me", "--password-stdin"], "", "the password is empty"),
        (["reg.example", "-u", "me", "--password-stdin"], "a\nb\n", "has more than one line"),
        (["reg.example", "-u", "m:e", "--password-stdin"], "s3cret", "the user name is empty, or contains `:`"),
        (["me:s3cret@reg.example", "-u", "me", "--password-stdin"], "pw", "'reg.example' is not a registry"),
        (["reg.example/team", "-u", "me", "--password-stdin"], "pw", "is not a registry: expected a host"),
        (["reg.example", "-p", "s3cret"], "", "No such option"),
    ],
)
def test_invalid_login_input_is_rejected_and_stores_nothing(
    file: Path, words: list[str], typed: str, message: str
) -> None:
    result = run("login", *words, typed=typed)
    assert result.exit_code == 2
    assert message in result.output
    assert "s3cret" not in result.output
    assert not file.exists()


def test_login_without_registry_response_stores_nothing(file: Path) -> None:
    result = run("login", "127.0.0.1:1", "-u", "me", "--password-stdin", typed="s3cret")
    assert result.exit_code == 1
    assert "given up after" in result.output
    assert "s3cret" not in result.output
    assert not file.exists()


def test_login_to_an_anonymous_registry_is_stored_with_a_warning(
    host: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    result = run("login", host, typed="me\ns3cret\n")
    assert result.exit_code == 0, result.output
    assert f"{host}: logged in as me; stored in {file}" in result.output
    assert "so this one was not verified" in result.stderr
    assert "s3cret" not in result.output
    assert list(json.loads(file.read_text())["auths"]) == [host]
    assert run("logout", host).output == f"{host}: logged out; removed from {file}\n"
    assert run("logout", host).output == f"{host}: no login is stored\n"
    assert json.loads(run("logout", host, "--output", "json").output) == {"registry": host, "forgotten": []}


def test_help_of_weights_login_and_logout_shows_an_example() -> None:
    assert "Example: pilotlight weights login ghcr.io -u robot --password-stdin" in run("login", "--help").output
    assert "Example: pilotlight weights logout ghcr.io" in run("logout", "--help").output
