"""`pilotlight weights login` against a real registry on loopback, with its passwords and with tokens of a realm."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import ConfigFiles
from pilotlight.cli.main import cli
from tests.support.real_services import docker_registry
from tests.support.real_services.docker_registry import PASSWORD, USER


async def run(*words: str, typed: str = "") -> Result:
    given = ["weights", *words]
    return await asyncio.to_thread(CliRunner().invoke, cli, given, input=typed, prog_name="pilotlight")


@contextlib.asynccontextmanager
async def registry(folder: Path, manner: str) -> AsyncIterator[str]:
    async with docker_registry.Realm().serving() as realm:
        auth = docker_registry.tokens(folder, realm.url) if manner == "token" else docker_registry.htpasswd(folder)
        async with docker_registry.registry(folder, auth) as host:
            yield host


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the logins file. REGISTRY_AUTH_FILE is not used: the registry reads it as a setting of its own."""
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return tmp_path / "docker/config.json"


async def test_registry_login_is_stored_only_after_the_registry_accepts_it(tmp_path: Path, file: Path) -> None:
    async with registry(tmp_path, "password") as host:
        wrong = await run("login", host, "-u", USER, "--password-stdin", typed="s3cret\n")
        assert wrong.exit_code == 1
        assert "rejects the login" in wrong.output
        assert "s3cret" not in wrong.output
        assert not file.exists()
        right = await run("login", host, "-u", USER, "--password-stdin", "--output", "json", typed=f"{PASSWORD}\n")
        assert right.exit_code == 0, right.output
        expected = {"registry": host, "username": USER, "checked": True, "file": str(file), "program": ""}
        assert json.loads(right.output) == expected
        assert await ConfigFiles([file]).login(host, "x") == Login(USER, PASSWORD)
        absent = "manifest latest of team/model"
        assert f"there is no {absent}" in (await run("inspect", f"{host}/team/model")).output
        assert (await run("logout", host)).output == f"{host}: logged out; removed from {file}\n"
        assert "requires a password, and none is stored" in (await run("inspect", f"{host}/team/model")).output


async def test_password_is_not_sent_to_a_realm_on_another_host(tmp_path: Path, file: Path) -> None:
    async with registry(tmp_path, "token") as host:
        result = await run("login", host, "-u", USER, "--password-stdin", typed=PASSWORD)
        assert result.exit_code == 1
        assert "no login is sent there" in result.output
        assert not file.exists()
