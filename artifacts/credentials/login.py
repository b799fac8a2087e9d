"""Logins in people's files, kept there and forgotten: Docker's and Podman's files, and the programs they name. I/O.

Owns which file a login goes into, and how that file changes: whole, for its owner alone, with all else in it as it was.
The entry itself is written by oras' store of logins (`oras.main.login.DockerClient`), into a copy of ours beside the
file. What of oras is not used, and why: its write in place (readable to others, and empty after a crash); its
`OrasClient.login` (asks Docker's daemon over HTTP first); its `logout` (forgets in memory only); its programs (they may
hang, cannot store or erase, and beside one it writes the password into the file as well).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from artifacts.credentials import credential_helpers, docker_config, keychain
from artifacts.credentials.docker_config import CONFIG_BYTES_MAX, Config, Login
from artifacts.disk import locks
from artifacts.errors import DeniedError, PolicyError

LOCK_S_MAX = 5.0

Auths = dict[str, dict[str, object]]


class LoginLocation(NamedTuple):
    """Where a login is kept."""

    file: Path
    program: str = ""
    """As `dockerconfig.program`; empty: in the file itself."""

    def __str__(self) -> str:
        """As people look for it."""
        return f"docker-credential-{self.program} ({self.file})" if self.program else str(self.file)


async def save_login(files: Sequence[Path], host: str, login: Login) -> LoginLocation:
    """The login (user and password) is that of the host from now on. Raises DeniedError, PolicyError.

    `files`: as `credentials.usual` has them. It goes into the first that has one of that host, else into the last.
    """
    place = await asyncio.to_thread(_place, files, host)
    if place.program:
        await credential_helpers.store_login(place.program, host, login)
    await asyncio.to_thread(_kept, place, host, login)
    return place


async def remove_login(files: Sequence[Path], host: str) -> list[LoginLocation]:
    """Nobody of the files and their programs knows the host's login any more; where one did. As `save_login` raises."""
    gone = list[LoginLocation]()
    for file in files:
        found = await asyncio.to_thread(_config, file)
        program = docker_config.find_credential_helper(found, host)
        if docker_config.list_registry_keys(found.auths, host):
            await asyncio.to_thread(_changed, file, lambda auths: _without(auths, host))
            gone += [] if program else [LoginLocation(file)]
        if program and await credential_helpers.erase_login(program, host):
            gone.append(LoginLocation(file, program))
    return gone


def _place(files: Sequence[Path], host: str) -> LoginLocation:
    for file in files:
        found = _config(file)
        named = any(docker_config.list_registry_keys([key], host) for key in found.cred_helpers)
        if named or docker_config.list_registry_keys(found.auths, host) or file == files[-1]:
            return LoginLocation(file, docker_config.find_credential_helper(found, host))
    raise PolicyError("there is no file for logins")


def _config(file: Path) -> Config:
    text = keychain.load_config_bytes(file, CONFIG_BYTES_MAX)
    return Config() if text is None else docker_config.parse_config(text, str(file))


def _kept(place: LoginLocation, host: str, login: Login) -> None:
    def change(auths: Auths) -> None:
        _without(auths, host)
        if place.program:
            auths[docker_config.format_server_url(host)] = {}  # as Docker marks whose login its program has

    def write(file: Path) -> None:
        from oras.main.login import DockerClient  # type: ignore[import-untyped]  # takes 0.2 s; has no types

        DockerClient().login(login.user, login.password, docker_config.format_server_url(host), str(file))

    _changed(place.file, change, None if place.program else write)


def _without(auths: Auths, host: str) -> None:
    for key in docker_config.list_registry_keys(auths, host):
        del auths[key]


def _changed(file: Path, change: Callable[[Auths], None], write: Callable[[Path], None] | None = None) -> None:
    """The file with other entries, put in its place by one rename. Raises PolicyError."""
    try:
        file = file.resolve()  # a link to somewhere else stays one
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locks.wait_for_lock(file.parent, LOCK_S_MAX):
            _config(file)  # says what is wrong with it
            document = json.loads(keychain.load_config_bytes(file, CONFIG_BYTES_MAX) or b"{}")
            change(document.setdefault("auths", {}))
            new = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
            try:
                _written(new, json.dumps(document, indent=4))
                if write is not None:
                    write(new)
                _synced(new)
                new.rename(file)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    new.unlink()
            _synced(file.parent)
    except TimeoutError:
        raise DeniedError(f"{file}: somebody else has been changing logins for {LOCK_S_MAX:.0f} s; try again") from None
    except OSError as error:
        raise PolicyError(f"{file}: the login cannot be written: {error.strerror}") from None


def _written(file: Path, text: str) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as opened:
        opened.write(text)


def _synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
