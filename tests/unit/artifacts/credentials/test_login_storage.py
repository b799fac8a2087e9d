"""Saved logins: one entry changes, atomically, in a file for the owner only, which never has a helper's password."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from artifacts.credentials import login_storage
from artifacts.credentials.docker_config import DOCKER_KEY, Login
from artifacts.credentials.keychain import ConfigFiles
from artifacts.credentials.login_storage import LoginLocation, remove_login, save_login
from artifacts.disk import locks
from artifacts.disk.durable_writes import Disk
from artifacts.registry_errors import DeniedError, PolicyError

HOST = "reg.example:5000"
HUB = "registry-1.docker.io"
GIVEN = Login("me", "pä:ss")
PROGRAM = """#!/bin/sh
read -r line
case $1 in
store) echo "$line" >"$KEPT";;
get) if [ -s "$KEPT" ]; then cat "$KEPT"; else echo 'credentials not found in native keychain'; exit 1; fi;;
erase) echo "$line" >"$KEPT.erased"; rm "$KEPT";;
esac
"""


def document(file: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(file.read_text())
    return found


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which docker-credential-fake stores its one login."""
    program = tmp_path / "docker-credential-fake"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KEPT", str(tmp_path / "kept"))
    return tmp_path / "kept"


async def test_saved_login_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "new/folder/config.json"
    old = os.umask(0)
    try:
        assert await save_login([tmp_path / "none.json", file], HOST, GIVEN) == LoginLocation(file)
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert document(file) == {"auths": {HOST: {"auth": base64.b64encode("me:pä:ss".encode()).decode()}}}
    assert await ConfigFiles([file]).login(HOST, "x") == GIVEN
    assert [one.name for one in file.parent.iterdir()] == ["config.json"]


async def test_saving_a_login_keeps_the_other_content_of_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    other = {"auth": "bzpw", "email": "o@example"}
    old = {f"https://{HOST}/v2/": {"auth": "YTpi", "identitytoken": "old"}, "other.example": other}
    file.write_text(json.dumps({"auths": {**old, f"{HOST}/team": other}, "HttpHeaders": {"X-Y": "z"}}))
    file.chmod(0o644)
    await save_login([file], HOST, GIVEN)
    found = document(file)
    assert found["HttpHeaders"] == {"X-Y": "z"}
    assert set(found["auths"]) == {HOST, "other.example", f"{HOST}/team"}
    assert found["auths"]["other.example"] == other
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert await ConfigFiles([file]).login(HOST, "x") == GIVEN


async def test_saving_a_login_to_a_symlink_updates_the_target_file(tmp_path: Path) -> None:
    real, file = tmp_path / "dotfiles.json", tmp_path / "config.json"
    real.write_text("{}")
    file.symlink_to(real)
    await save_login([file], HUB, GIVEN)
    assert file.is_symlink()
    assert set(document(real)["auths"]) == {DOCKER_KEY}


async def test_login_is_saved_in_the_file_that_has_its_host_or_in_the_last_file(tmp_path: Path) -> None:
    first, last = tmp_path / "podman.json", tmp_path / "docker.json"
    first.write_text(json.dumps({"auths": {HOST: {"auth": "YTpi"}}}))
    assert await save_login([first, last], HOST, GIVEN) == LoginLocation(first)
    assert await save_login([first, last], "other.example", GIVEN) == LoginLocation(last)
    for host in (HOST, "other.example"):
        assert await ConfigFiles([first, last]).login(host, "x") == GIVEN


async def test_login_that_cannot_be_written_leaves_the_config_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"auths": {"other.example": {"auth": "YTpi"}}}')
    before = file.read_text()

    def full(disk: Disk, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, "settle", full)
    with pytest.raises(PolicyError, match=r"config\.json: the login cannot be written: No space left"):
        await save_login([file], HOST, GIVEN)
    assert file.read_text() == before
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"]


async def test_saving_a_login_does_not_modify_a_malformed_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[s3cret")
    with pytest.raises(PolicyError, match=r"config\.json: not a JSON object") as refused:
        await save_login([file], HOST, GIVEN)
    assert "s3cret" not in str(refused.value)
    assert file.read_text() == "[s3cret"


async def test_saving_a_login_fails_while_another_process_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_storage, "LOCK_S_MAX", 0.0)
    held = locks.try_lock(tmp_path)
    assert held is not None
    with held, pytest.raises(DeniedError, match="another process has locked the file"):
        await save_login([tmp_path / "config.json"], HOST, GIVEN)
    await save_login([tmp_path / "config.json"], HOST, GIVEN)


@pytest.mark.standard
@pytest.mark.parametrize("by", [{"credsStore": "fake"}, {"credHelpers": {HOST: "fake"}}])
async def test_password_stored_by_a_helper_is_not_in_the_config_file(
    tmp_path: Path, kept: Path, by: dict[str, object]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"auths": {HOST: {"auth": "YTpi"}}, **by}))
    assert await save_login([file], HOST, GIVEN) == LoginLocation(file, "fake")
    assert json.loads(kept.read_text()) == {"ServerURL": HOST, "Username": "me", "Secret": "pä:ss"}
    assert document(file)["auths"] == {HOST: {}}
    assert await ConfigFiles([file]).login(HOST, "x") == GIVEN
    assert await remove_login([file], HOST) == [LoginLocation(file, "fake")]
    assert kept.with_suffix(".erased").read_text().strip() == HOST
    assert document(file)["auths"] == {}
    assert await remove_login([file], HOST) == []


@pytest.mark.standard
async def test_failing_credential_helper_leaves_the_config_file_unchanged(tmp_path: Path, kept: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"credsStore": "fake"}')
    (tmp_path / "docker-credential-fake").write_text("#!/bin/sh\ncat; exit 1\n")
    with pytest.raises(DeniedError, match="fake failed with status 1 and stored no login") as refused:
        await save_login([file], HOST, GIVEN)
    assert GIVEN.password not in str(refused.value)
    assert file.read_text() == '{"credsStore": "fake"}'
    (tmp_path / "docker-credential-fake").unlink()
    with pytest.raises(DeniedError, match="docker-credential-fake, which stores its login, cannot be started"):
        await save_login([file], HOST, GIVEN)


async def test_removing_a_login_deletes_every_entry_of_that_host_only(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "none.json"]
    for file in files[:2]:
        auths = {HOST: {"auth": "YTpi"}, f"https://{HOST}/v1/": {}, "other.example": {"auth": "YTpi"}}
        file.write_text(json.dumps({"auths": auths}))
    assert await remove_login(files, HOST) == [LoginLocation(files[0]), LoginLocation(files[1])]
    assert [set(document(file)["auths"]) for file in files[:2]] == [{"other.example"}] * 2
    assert await remove_login(files, HOST) == []
    assert not files[2].exists()
