"""Credential helpers: their input and output, and how a failing or hanging helper is reported and ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from artifacts.credentials import credential_helpers
from artifacts.credentials.docker_config import DOCKER_KEY, Login
from artifacts.registry_errors import DeniedError
from tests.support.fakes.credential_helper import program

pytestmark = pytest.mark.standard

HUB = "registry-1.docker.io"


async def test_docker_hub_login_is_stored_by_a_helper_under_the_hub_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program(tmp_path, monkeypatch, "echo $1 >word; cat >input")
    await credential_helpers.store_login("fake", HUB, Login("me", "pw"))
    assert (tmp_path / "word").read_text() == "store\n"
    assert json.loads((tmp_path / "input").read_text()) == {"ServerURL": DOCKER_KEY, "Username": "me", "Secret": "pw"}
    await credential_helpers.store_login("fake", "reg.example", Login(identity_token="refresh"))
    want = {"ServerURL": "reg.example", "Username": "<token>", "Secret": "refresh"}
    assert json.loads((tmp_path / "input").read_text()) == want


async def test_erasing_a_login_fails_if_the_credential_helper_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program(tmp_path, monkeypatch, 'echo $1 >>words; cat >input; echo \'{"Username": "me", "Secret": "pw"}\'')
    assert await credential_helpers.erase_login("fake", HUB)
    assert (tmp_path / "words").read_text() == "get\nerase\n"
    assert (tmp_path / "input").read_text() == DOCKER_KEY
    program(tmp_path, monkeypatch, "echo credentials not found in native keychain; exit 1")
    assert not await credential_helpers.erase_login("fake", HUB)
    program(tmp_path, monkeypatch, 'echo \'{"Username": "me", "Secret": "s3cret"}\'; test $1 = get')
    with pytest.raises(DeniedError, match="failed with status 1 and may still have the login") as refused:
        await credential_helpers.erase_login("fake", HUB)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo s3cret; echo s3cret >&2; exit 3", "failed with status 3 and returned no login"),
        ("echo s3cret", "returned an invalid login"),
        ("yes s3cret", "returned too much output for a login"),
    ],
)
async def test_error_of_a_failing_credential_helper_hides_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    program(tmp_path, monkeypatch, text)
    with pytest.raises(DeniedError, match=message) as refused:
        await credential_helpers.get_login("fake", "reg.example", 5)
    assert "s3cret" not in str(refused.value)


async def test_hanging_credential_helper_is_killed_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, f"echo $$ >{tmp_path}/pid; sleep 600; echo never")
    with pytest.raises(DeniedError, match="returned no login within"):
        await credential_helpers.get_login("fake", "reg.example", 0.3)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    with pytest.raises(DeniedError, match=r"docker-credential-absent, which stores its login, cannot be started"):
        await credential_helpers.get_login("absent", "reg.example")
