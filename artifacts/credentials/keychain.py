"""Looks up registry logins in files, credential helpers and Kubernetes secrets, in a fixed order. I/O.

Files are read on every lookup, so that a renewed login takes effect. `docker_config` selects the entry of a file,
`credential_helpers` runs the helpers, and `clouds` provides logins of cloud identities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from artifacts.credentials import credential_helpers, docker_config
from artifacts.credentials.docker_config import CONFIG_BYTES_MAX, Config, Login
from artifacts.registry_errors import AbsentError, DeniedError, PolicyError

T = TypeVar("T")


class Keychain(Protocol):
    """A source of logins."""

    async def login(self, host: str, repository: str) -> Login | None:
        """Return the login, or None if this source has none. Raises PolicyError, DeniedError."""


class Chain:
    """Returns the first login that any of several sources has."""

    def __init__(self, chains: Sequence[Keychain] = ()) -> None:
        self._chains = chains

    async def login(self, host: str, repository: str) -> Login | None:
        """See `Keychain.login`."""
        for one in self._chains:
            if (found := await one.login(host, repository)) is not None:
                return found
        return None


class Known:
    """A fixed login for one registry."""

    def __init__(self, host: str, login: Login) -> None:
        self._host = host
        self._login = login

    async def login(self, host: str, repository: str) -> Login | None:  # noqa: ARG002 -- required by Keychain
        """See `Keychain.login`."""
        return self._login if host in docker_config.list_host_aliases(self._host) else None


async def try_each_login(
    secrets: Sequence[Config], host: str, repository: str, rest: Keychain, do: Callable[[Keychain], Awaitable[T]]
) -> T:
    """Run `do` with each login of a pod's pull secrets until one is accepted, as the kubelet does.

    `rest` holds the node's own logins. During each attempt it provides the logins for other hosts; the last attempt
    uses only `rest`. Raises what `do` raises: the first refusal if no login is accepted, and PolicyError for an invalid
    secret.
    """
    first: DeniedError | AbsentError | None = None
    for one in docker_config.list_logins(secrets, host, repository):
        try:
            return await do(Chain([Known(host, one), rest]))
        except (DeniedError, AbsentError) as error:  # registries report either for content the caller may not see
            first = first or error
    try:
        return await do(rest)
    except (DeniedError, AbsentError) as error:
        raise (first or error) from None


class ConfigFiles:
    """Docker's and Podman's login files, and the credential helpers that they name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    async def login(self, host: str, repository: str) -> Login | None:
        """See `Keychain.login`."""
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
    """Return the login files of Docker and Podman in lookup order."""
    if env.get("REGISTRY_AUTH_FILE"):
        return [Path(env["REGISTRY_AUTH_FILE"])]
    docker = Path(env["DOCKER_CONFIG"]) if env.get("DOCKER_CONFIG") else home / ".docker"
    config = Path(env["XDG_CONFIG_HOME"]) if env.get("XDG_CONFIG_HOME") else home / ".config"
    run = [Path(env["XDG_RUNTIME_DIR"]) / "containers/auth.json"] if env.get("XDG_RUNTIME_DIR") else []
    return [*run, config / "containers/auth.json", docker / "config.json"]


def load_config_bytes(path: Path, bytes_max: int) -> bytes | None:
    """Read a file up to one byte over the limit; None if it does not exist. Raises PolicyError."""
    try:
        with path.open("rb") as file:
            return file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from None
