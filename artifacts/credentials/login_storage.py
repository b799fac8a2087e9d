"""Stores and removes logins in Docker's and Podman's config files and their credential helpers. I/O.

Chooses the file for a login and replaces it atomically, readable only by its owner, with all other content unchanged.
The entry itself is written by oras (`oras.main.login.DockerClient`) into a temporary copy next to the file.

These parts of oras are not used, for these reasons:

* its in-place write: the file is world-readable, and empty after a crash
* `OrasClient.login`: it first contacts the Docker daemon over HTTP
* its `logout`: it only clears memory
* its helper support: helpers may hang, cannot store or erase, and the password is also written into the file
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
from artifacts.disk.durable_writes import Disk
from artifacts.registry_errors import DeniedError, PolicyError

LOCK_S_MAX = 5.0

Auths = dict[str, dict[str, object]]


class LoginLocation(NamedTuple):
    """Where a login is stored."""

    file: Path
    program: str = ""
    """As from `docker_config.find_credential_helper`; empty if the login is in the file itself."""

    def __str__(self) -> str:
        """Format the location for users."""
        return f"docker-credential-{self.program} ({self.file})" if self.program else str(self.file)


async def save_login(files: Sequence[Path], host: str, login: Login) -> LoginLocation:
    """Store a login (user and password) for the host. Raises DeniedError, PolicyError.

    `files`: as from `keychain.list_config_paths`. The first with an entry for the host is used, else the last.
    """
    place = await asyncio.to_thread(_place, files, host)
    if place.program:
        await credential_helpers.store_login(place.program, host, login)
    await asyncio.to_thread(_kept, place, host, login)
    return place


async def remove_login(files: Sequence[Path], host: str) -> list[LoginLocation]:
    """Remove the host's login from all files and helpers; return where it was found. Raises as `save_login`."""
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
    raise PolicyError("the login cannot be stored: the list of login files is empty")


def _config(file: Path) -> Config:
    text = keychain.load_config_bytes(file, CONFIG_BYTES_MAX)
    return Config() if text is None else docker_config.parse_config(text, str(file))


def _kept(place: LoginLocation, host: str, login: Login) -> None:
    def change(auths: Auths) -> None:
        _without(auths, host)
        if place.program:
            auths[docker_config.format_server_url(host)] = {}  # as Docker marks logins kept by a helper

    def write(file: Path) -> None:
        from oras.main.login import DockerClient  # type: ignore[import-untyped]  # takes 0.2 s; has no types

        DockerClient().login(login.user, login.password, docker_config.format_server_url(host), str(file))

    _changed(place.file, change, None if place.program else write)


def _without(auths: Auths, host: str) -> None:
    for key in docker_config.list_registry_keys(auths, host):
        del auths[key]


def _changed(file: Path, change: Callable[[Auths], None], write: Callable[[Path], None] | None = None) -> None:
    """Change the file's entries and replace it with one rename. Raises PolicyError."""
    try:
        file = file.resolve()  # keep a symbolic link in place
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locks.wait_for_lock(file.parent, LOCK_S_MAX):
            _config(file)  # raises if the file is invalid
            document = json.loads(keychain.load_config_bytes(file, CONFIG_BYTES_MAX) or b"{}")
            change(document.setdefault("auths", {}))
            disk, new = Disk(), file.with_name(f".{file.name}.{secrets.token_hex(8)}")
            try:
                _written(new, json.dumps(document, indent=4))
                if write is not None:
                    write(new)
                disk.settle(new)
                new.rename(file)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    new.unlink()
            disk.settle(file.parent)
    except TimeoutError:
        raise DeniedError(f"{file}: another process has locked the file for {LOCK_S_MAX:.0f} s; try again") from None
    except OSError as error:
        raise PolicyError(f"{file}: the login cannot be written: {error.strerror}") from None


def _written(file: Path, text: str) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as opened:
        opened.write(text)
