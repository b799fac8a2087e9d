"""Parses registry logins from Docker's and Podman's `config.json` and from Kubernetes pull secrets. Pure.

Also selects the entry for a registry. A login is used only for the host that its entry names. Podman's entries may name
a repository (the longest match wins); Kubernetes' entries may have `*` in the components of a host name.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from artifacts.reference import DOCKER_HOSTS
from artifacts.registry_errors import PolicyError

DOCKER_KEY = "https://index.docker.io/v1/"
IDENTITY_USER = "<token>"
"""User name that marks the secret as an identity token (an OAuth2 refresh token)."""
CONFIG_BYTES_MAX = 1 << 20
SECRETS = {"kubernetes.io/dockerconfigjson": ".dockerconfigjson", "kubernetes.io/dockercfg": ".dockercfg"}
"""Kubernetes secret types that hold logins, and the data key of each."""
_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials for one registry; hidden from `repr`."""

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)
    """Bearer token that is sent to the registry unchanged."""
    whose: str = field(default="", repr=False)
    """Stable name of the identity if the other fields change hourly (a machine's identity)."""
    note: str = ""
    """Of a login without credentials: the reason and the fix."""

    @property
    def anonymous(self) -> bool:
        """Whether the login has no credentials."""
        return not (self.user or self.identity_token or self.registry_token)

    @property
    def basic(self) -> str:
        """Value of the Authorization header for Basic authentication."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class AuthConfig(msgspec.Struct, frozen=True):
    """One entry of `auths`."""

    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""
    registrytoken: str = ""


class Config(msgspec.Struct, frozen=True, rename={"cred_helpers": "credHelpers", "creds_store": "credsStore"}):
    """A parsed login file."""

    auths: dict[str, AuthConfig] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


def parse_config(text: bytes | str, name: str) -> Config:
    """Parse a login file. Raises PolicyError that names the source (`name`) and shows none of the text."""
    if len(text) > CONFIG_BYTES_MAX:
        raise PolicyError(f"{name}: larger than {CONFIG_BYTES_MAX >> 20} MiB")
    try:
        found = msgspec.json.decode(text, type=Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise PolicyError(f"{name}: not a JSON object with logins in Docker's format") from None
    for program in (*found.cred_helpers.values(), *([found.creds_store] if found.creds_store else [])):
        if not _PROGRAM.fullmatch(program):
            raise PolicyError(f"{name}: the name of a credential helper has invalid characters")
    return found


def parse_pull_secret(type: str, data: Mapping[str, str], name: str = "a pull secret") -> Config:
    """Parse the logins of a Kubernetes secret; `data` is base64 as returned by its API. Raises PolicyError.

    Credential helpers named in it are ignored, as in the kubelet.
    """
    key = SECRETS.get(type)
    if key is None:
        kinds = " or ".join(SECRETS)
        raise PolicyError(f"{name}: its type is not {kinds}; `kubectl create secret docker-registry` creates one")
    try:
        text = base64.b64decode(data.get(key, ""), validate=True)
    except (binascii.Error, ValueError):
        text = b""
    if not text:
        raise PolicyError(f"{name}: {key} is missing or invalid")
    if key == ".dockercfg":  # the file has only the entries: Docker's format until 2015
        text = b'{"auths":' + text + b"}"
    return Config(parse_config(text, name).auths)


def list_logins(secrets: Sequence[Config], host: str, repository: str, name: str = "a pull secret") -> list[Login]:
    """Return the logins of several secrets for a repository, in the order in which the kubelet tries them.

    Sorted by entry key, the more specific first (reverse alphabetical), then by secret. Raises PolicyError.
    """
    fitting = [
        ((_host(key), _path(key)), -number, found)
        for number, one in enumerate(secrets)
        for key in _keys(one.auths, host, repository, globs=True)
        if (found := _entry(one.auths[key], host, name)) is not None
    ]
    fitting.sort(key=lambda one: one[:2], reverse=True)
    return list(dict.fromkeys(found for _, _, found in fitting))


def list_registry_keys(keys: Iterable[str], host: str) -> list[str]:
    """Return the keys that refer to the whole registry, in any spelling."""
    return [key for key in keys if not _path(key) and _host(key) in list_host_aliases(host)]


def find_credential_helper(found: Config, host: str) -> str:
    """Return the helper's name (after `docker-credential-`) for a host; empty if there is none."""
    for key, name in found.cred_helpers.items():
        if _host(key) in list_host_aliases(host):
            return name
    return found.creds_store


def find_login(found: Config, host: str, repository: str, name: str) -> Login | None:
    """Return the login stored in the file itself, or None. Raises PolicyError for an invalid entry."""
    entry = next((found.auths[key] for key in _keys(found.auths, host, repository)), None)
    return None if entry is None else _entry(entry, host, name)


def _entry(entry: AuthConfig, host: str, name: str) -> Login | None:
    user, password = entry.username, entry.password
    if entry.auth:
        try:
            user, colon, password = base64.b64decode(entry.auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise PolicyError(f"{name}: the entry of {host} has an auth that is not USER:PASSWORD in base64")
        password = password.rstrip("\0")
    if user == IDENTITY_USER and not entry.identitytoken:
        return Login(identity_token=password)
    if not (user or entry.identitytoken or entry.registrytoken):
        return None  # Docker leaves empty entries for logins kept by a helper
    return Login(user, password, entry.identitytoken, entry.registrytoken)


def list_host_aliases(host: str) -> frozenset[str]:
    """Return all names of a registry."""
    return DOCKER_HOSTS if host in DOCKER_HOSTS else frozenset({host})


def format_server_url(host: str) -> str:
    """Return the server name that credential helpers expect for a host."""
    return DOCKER_KEY if host in DOCKER_HOSTS else host


def _keys(auths: Mapping[str, AuthConfig], host: str, repository: str, *, globs: bool = False) -> Iterator[str]:
    """Yield the matching keys, the longest path first. `globs`: match wildcards as Kubernetes does."""
    for key in sorted(auths, key=lambda key: (-len(_path(key)), key)):
        path = _path(key)
        if path and not (repository == path or repository.startswith(path + "/")):
            continue
        if _host(key) in list_host_aliases(host) or (globs and _fits(_host(key), host)):
            yield key


def _plain(key: str) -> str:
    return key.removeprefix("https://").removeprefix("http://")


def _host(key: str) -> str:
    return _plain(key).partition("/")[0].lower()


def _path(key: str) -> str:
    path = _plain(key).partition("/")[2].strip("/")
    return "" if path in {"v1", "v2"} else path


def _fits(pattern: str, host: str) -> bool:
    """Match a host; `*` matches within one label, so `*.example` does not match `a.b.example`; ports must be equal."""
    want, have = pattern.rpartition(":"), host.rpartition(":")
    if want[2].isdigit() != have[2].isdigit() or (want[2].isdigit() and want[2] != have[2]):
        return False
    labels = (want[0] if want[2].isdigit() else pattern).split("."), (have[0] if have[2].isdigit() else host).split(".")
    return len(labels[0]) == len(labels[1]) and all(
        fnmatch.fnmatchcase(label, one) for one, label in zip(*labels, strict=True)
    )
