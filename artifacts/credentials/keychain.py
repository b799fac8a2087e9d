"""Where logins come from: files, credential programs, Kubernetes' secrets. I/O.

Owns the asking, and the order of it. Promises: files are read at each asking, so that a login that was renewed is
seen. Which entry is whose is `dockerconfig`'s, what a program says `programs`', what a cloud gives `clouds`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from artifacts.credentials import credential_helpers, docker_config
from artifacts.credentials.docker_config import CONFIG_BYTES_MAX, Config, Login
from artifacts.errors import AbsentError, DeniedError, PolicyError

T = TypeVar("T")


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


class Known:
    """One login, for one registry."""

    def __init__(self, host: str, login: Login) -> None:
        self._host = host
        self._login = login

    async def login(self, host: str, repository: str) -> Login | None:  # noqa: ARG002 -- a Keychain's
        """As Keychain."""
        return self._login if host in docker_config.list_host_aliases(self._host) else None


async def try_each_login(
    secrets: Sequence[Config], host: str, repository: str, rest: Keychain, do: Callable[[Keychain], Awaitable[T]]
) -> T:
    """What is done for a pod with pull secrets, as kubelets do it: with each of its logins until one is let in.

    `rest` is the node's own: it stands behind each login for other hosts, and is tried alone at last. Raises what `do`
    raises: the first refusal where nobody is let in, and PolicyError of a secret.
    """
    first: DeniedError | AbsentError | None = None
    for one in docker_config.list_logins(secrets, host, repository):
        try:
            return await do(Chain([Known(host, one), rest]))
        except (DeniedError, AbsentError) as error:  # registries say either of what somebody may not see
            first = first or error
    try:
        return await do(rest)
    except (DeniedError, AbsentError) as error:
        raise (first or error) from None


class ConfigFiles:
    """Docker's and Podman's files, with the credential programs that they name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    async def login(self, host: str, repository: str) -> Login | None:
        """As Keychain."""
        for path in self._files:
            text = await asyncio.to_thread(load_config_bytes, path, CONFIG_BYTES_MAX)
            if text is None:
                continue
            found = docker_config.parse_config(text, str(path))
            name = docker_config.find_credential_helper(found, host)
            one = await credential_helpers.get_login(name, host) if name else None
            one = one or docker_config.find_login(found, host, repository, str(path))
            if one is not None:
                return one
        return None


def list_config_paths(env: Mapping[str, str], home: Path) -> list[Path]:
    """Where Docker and Podman keep their files, in the order in which they are asked."""
    if env.get("REGISTRY_AUTH_FILE"):
        return [Path(env["REGISTRY_AUTH_FILE"])]
    docker = Path(env["DOCKER_CONFIG"]) if env.get("DOCKER_CONFIG") else home / ".docker"
    config = Path(env["XDG_CONFIG_HOME"]) if env.get("XDG_CONFIG_HOME") else home / ".config"
    run = [Path(env["XDG_RUNTIME_DIR"]) / "containers/auth.json"] if env.get("XDG_RUNTIME_DIR") else []
    return [*run, config / "containers/auth.json", docker / "config.json"]


def load_config_bytes(path: Path, bytes_max: int) -> bytes | None:
    """A file, or one byte more than is allowed; None: there is no such file. Raises PolicyError."""
    try:
        with path.open("rb") as file:
            return file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from None
