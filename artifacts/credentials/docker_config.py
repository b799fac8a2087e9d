"""Logins as people's files have them: Docker's and Podman's `config.json`, Kubernetes' pull secrets. Pure.

Owns the reading of these texts, and which entry is whose. A login goes to the host that its entry names; Podman's
entries may name a repository (the longest one that fits is taken), Kubernetes' may have `*` in a host's parts.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from artifacts.errors import PolicyError
from artifacts.reference import DOCKER_HOSTS

DOCKER_KEY = "https://index.docker.io/v1/"
IDENTITY_USER = "<token>"
"""The user name with which a secret is an identity token (OAuth2's refresh token)."""
CONFIG_BYTES_MAX = 1 << 20
SECRETS = {"kubernetes.io/dockerconfigjson": ".dockerconfigjson", "kubernetes.io/dockercfg": ".dockercfg"}
"""Types of Kubernetes' secrets with logins, and where in them those are."""
_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Login:
    """What one registry gets; not shown by `repr`."""

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)
    """Sent to the registry as it is."""
    whose: str = field(default="", repr=False)
    """Who it is, where the rest changes from hour to hour (a machine's identity)."""
    note: str = ""
    """Of a login that is none: why, and what to do."""

    @property
    def anonymous(self) -> bool:
        """Nothing that a registry could be shown."""
        return not (self.user or self.identity_token or self.registry_token)

    @property
    def basic(self) -> str:
        """The header's value."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class AuthConfig(msgspec.Struct, frozen=True):
    """One of `auths`."""

    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""
    registrytoken: str = ""


class Config(msgspec.Struct, frozen=True, rename={"cred_helpers": "credHelpers", "creds_store": "credsStore"}):
    """A file of logins."""

    auths: dict[str, AuthConfig] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


def parse_config(text: bytes | str, name: str) -> Config:
    """Raises PolicyError that names `name`, where it came from; nothing of the text is shown."""
    if len(text) > CONFIG_BYTES_MAX:
        raise PolicyError(f"{name}: larger than {CONFIG_BYTES_MAX >> 20} MiB")
    try:
        found = msgspec.json.decode(text, type=Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise PolicyError(f"{name}: no JSON object with logins as Docker writes them") from None
    for program in (*found.cred_helpers.values(), *([found.creds_store] if found.creds_store else [])):
        if not _PROGRAM.fullmatch(program):
            raise PolicyError(f"{name}: a name of a credential program has characters that none has")
    return found


def parse_pull_secret(type: str, data: Mapping[str, str], name: str = "a pull secret") -> Config:
    """The logins of a Kubernetes secret; `data` as its API gives it, in base64. Raises PolicyError.

    Credential programs that it names are left out: kubelets start none for a secret, either.
    """
    key = SECRETS.get(type)
    if key is None:
        kinds = " or ".join(SECRETS)
        raise PolicyError(f"{name}: is of another type than {kinds}; `kubectl create secret docker-registry` makes one")
    try:
        text = base64.b64decode(data.get(key, ""), validate=True)
    except (binascii.Error, ValueError):
        text = b""
    if not text:
        raise PolicyError(f"{name}: has nothing at {key} that could be read")
    if key == ".dockercfg":  # the entries alone, as Docker wrote them until 2015
        text = b'{"auths":' + text + b"}"
    return Config(parse_config(text, name).auths)


def list_logins(secrets: Sequence[Config], host: str, repository: str, name: str = "a pull secret") -> list[Login]:
    """What several secrets have for one repository, in the order in which kubelets try it. Raises PolicyError.

    That is: by the entry's key, the more exact first (the reverse of the alphabet), and of the same key by secret.
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
    """Those that stand for all of a registry, however they are spelt."""
    return [key for key in keys if not _path(key) and _host(key) in list_host_aliases(host)]


def find_credential_helper(found: Config, host: str) -> str:
    """What comes after `docker-credential-`, of the program that knows the login of a host; empty: none does."""
    for key, name in found.cred_helpers.items():
        if _host(key) in list_host_aliases(host):
            return name
    return found.creds_store


def find_login(found: Config, host: str, repository: str, name: str) -> Login | None:
    """The login in the text itself. Raises PolicyError for an entry that is none."""
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
        return None  # Docker leaves empty entries beside a program's
    return Login(user, password, entry.identitytoken, entry.registrytoken)


def list_host_aliases(host: str) -> frozenset[str]:
    """All that a registry is called."""
    return DOCKER_HOSTS if host in DOCKER_HOSTS else frozenset({host})


def format_server_url(host: str) -> str:
    """As credential programs are asked."""
    return DOCKER_KEY if host in DOCKER_HOSTS else host


def _keys(auths: Mapping[str, AuthConfig], host: str, repository: str, *, globs: bool = False) -> Iterator[str]:
    """Those that fit, the longest first. `globs`: as Kubernetes reads them."""
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
    """A `*` stands for (a part of) one label, so that `*.example` is no name of `a.b.example`; ports are the same."""
    want, have = pattern.rpartition(":"), host.rpartition(":")
    if want[2].isdigit() != have[2].isdigit() or (want[2].isdigit() and want[2] != have[2]):
        return False
    labels = (want[0] if want[2].isdigit() else pattern).split("."), (have[0] if have[2].isdigit() else host).split(".")
    return len(labels[0]) == len(labels[1]) and all(
        fnmatch.fnmatchcase(label, one) for one, label in zip(*labels, strict=True)
    )
