"""Where logins come from: files, credential programs, a Kubernetes secret's text, a token that is mounted. I/O.

Owns the asking. Promises: a credential program gets a few seconds and the host, nothing else; its words are not shown;
files are read at each asking, so that a login that was renewed is seen. Which entry is whose is `dockerconfig`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from artifacts import dockerconfig
from artifacts.dockerconfig import CONFIG_BYTES_MAX, IDENTITY_USER, Login
from artifacts.refusals import DeniedError, PolicyError

PROGRAM_S_MAX = 10.0
END_S_MAX = 1.0
PROGRAM_BYTES_MAX = 64 << 10
TOKEN_BYTES_MAX = 64 << 10
UNKNOWN = b"credentials not found"
"""What programs say on their output where they know none (Docker's protocol for them)."""


class Keychain(Protocol):
    """Knows logins."""

    async def login(self, host: str, repository: str) -> Login | None:
        """None: it knows none for this one. Raises PolicyError, DeniedError."""


class Chain:
    """The first of several that knows."""

    def __init__(self, chains: Sequence[Keychain] = ()) -> None:
        self._chains = chains

    async def login(self, host: str, repository: str) -> Login | None:
        """As Keychain."""
        for one in self._chains:
            if (found := await one.login(host, repository)) is not None:
                return found
        return None


class Secret:
    """The text of a Kubernetes secret of type `kubernetes.io/dockerconfigjson`."""

    def __init__(self, text: bytes | str, name: str = "dockerconfigjson") -> None:
        self._config = dockerconfig.config(text, name)
        self._name = name

    async def login(self, host: str, repository: str) -> Login | None:
        """As Keychain; no programs are started for it."""
        return dockerconfig.login(self._config, host, repository, self._name, globs=True)


class TokenFile:
    """A token that somebody mounts and renews (a workload's identity), for one registry.

    With a user it is the password of that user; without one the registry takes it as it is.
    """

    def __init__(self, path: Path, host: str, user: str = "") -> None:
        self._path = path
        self._host = host
        self._user = user

    async def login(self, host: str, repository: str) -> Login | None:  # noqa: ARG002 -- a Keychain's
        """As Keychain."""
        if host not in dockerconfig.names(self._host):
            return None
        text = (await asyncio.to_thread(_read, self._path, TOKEN_BYTES_MAX) or b"").strip()
        if not text or not text.isascii() or not text.decode().isprintable():
            raise PolicyError(f"{self._path.name}: no token is in it, for {host}")
        token = text.decode()
        return Login(self._user, token) if self._user else Login(registry_token=token)


class ConfigFiles:
    """Docker's and Podman's files, with the credential programs that they name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    async def login(self, host: str, repository: str) -> Login | None:
        """As Keychain."""
        for path in self._files:
            text = await asyncio.to_thread(_read, path, CONFIG_BYTES_MAX)
            if text is None:
                continue
            found = dockerconfig.config(text, str(path))
            name = dockerconfig.program(found, host)
            one = await asked(name, host) if name else None
            one = one or dockerconfig.login(found, host, repository, str(path))
            if one is not None:
                return one
        return None


def usual(env: Mapping[str, str], home: Path) -> list[Path]:
    """Where Docker and Podman keep their files, in the order in which they are asked."""
    if env.get("REGISTRY_AUTH_FILE"):
        return [Path(env["REGISTRY_AUTH_FILE"])]
    docker = Path(env["DOCKER_CONFIG"]) if env.get("DOCKER_CONFIG") else home / ".docker"
    config = Path(env["XDG_CONFIG_HOME"]) if env.get("XDG_CONFIG_HOME") else home / ".config"
    run = [Path(env["XDG_RUNTIME_DIR"]) / "containers/auth.json"] if env.get("XDG_RUNTIME_DIR") else []
    return [*run, config / "containers/auth.json", docker / "config.json"]


async def asked(name: str, host: str, within_s: float = PROGRAM_S_MAX) -> Login | None:
    """What `docker-credential-NAME get` says of a host. Raises DeniedError."""
    program = f"docker-credential-{name}"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "get",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=PROGRAM_BYTES_MAX,
        )
    except OSError as error:
        raise DeniedError(f"{host}: {program}, which knows its login, cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(within_s):
            text = await _said(process, dockerconfig.server(host).encode())
            if len(text) > PROGRAM_BYTES_MAX:
                raise DeniedError(f"{host}: {program} said far more than a login")
            code = await process.wait()
    except TimeoutError:
        raise DeniedError(f"{host}: {program} did not say its login within {within_s:.0f} s") from None
    finally:
        await _end(process)
    if code != 0:
        if UNKNOWN in text:
            return None
        raise DeniedError(f"{host}: {program} ended with {code} and told no login")
    return _spoken(text, program, host)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends it with what it started, if it has not ended by itself."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # somebody who left its group may keep its output open
            async with asyncio.timeout(END_S_MAX):
                await process.communicate()


async def _said(process: asyncio.subprocess.Process, question: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the program has pipes")
    process.stdin.write(question)
    try:
        await process.stdin.drain()
    except ConnectionError:
        pass  # it needs no question to answer, or ends: its code says which
    process.stdin.close()
    text = b""
    while len(text) <= PROGRAM_BYTES_MAX and (more := await process.stdout.read(PROGRAM_BYTES_MAX)):
        text += more
    return text


class _Spoken(msgspec.Struct, frozen=True, rename="pascal"):
    username: str = ""
    secret: str = ""


def _spoken(text: bytes, program: str, host: str) -> Login | None:
    try:
        found = msgspec.json.decode(text, type=_Spoken)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DeniedError(f"{host}: {program} said something that is no login") from None
    if found.username == IDENTITY_USER:
        return Login(identity_token=found.secret)
    return Login(found.username, found.secret) if found.username and found.secret else None


def _read(path: Path, bytes_max: int) -> bytes | None:
    """None: there is no such file. Raises PolicyError."""
    try:
        with path.open("rb") as file:
            return file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from None
