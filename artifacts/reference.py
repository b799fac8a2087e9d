"""Parses artifact references as users write them. Pure.

Implements the grammar of `host:port/repository:tag@digest` (OCI distribution specification names, Docker short names)
and of Ollama names, which also refer to a registry. A parsed reference is safe to use in a URL without escaping. The
client decides whether the host may be contacted.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from artifacts.digest import BadDigestError, Digest, parse_digest

DOCKER, DOCKER_HOST = "docker.io", "registry-1.docker.io"
DOCKER_HOSTS = frozenset({DOCKER, "index.docker.io", DOCKER_HOST})
OLLAMA = "registry.ollama.ai"
NAME_CHARS_MAX = 255
"""Limit for registry and repository together, as the specification recommends."""
TEXT_CHARS_MAX = 1024
_SHOWN_CHARS_MAX = 120

_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_OLLAMA_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.)){0,79}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?P<name>{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?")


class BadReferenceError(ValueError):
    """The text is not a reference; the message is one line that shows the input without credentials, and the fix."""


class Reference(NamedTuple):
    """An artifact in a registry. All parts can be used in a URL without escaping."""

    registry: str
    """Lowercase host, with the port if one was given: `docker.io`, `localhost:5000`, `[::1]:5000`."""
    repository: str
    tag: str | None = None
    digest: Digest | None = None
    """If set, it identifies the manifest, and the tag is informational only."""

    def __str__(self) -> str:
        """Format the complete reference."""
        tag = f":{self.tag}" if self.tag is not None else ""
        return f"{self.registry}/{self.repository}{tag}" + (f"@{self.digest}" if self.digest is not None else "")

    @property
    def asked(self) -> str:
        """Reference used in manifest requests: the digest, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    @property
    def host(self) -> str:
        """Host to contact. Docker Hub's registry host differs from the host in its image names."""
        return DOCKER_HOST if self.registry == DOCKER else self.registry


def parse_reference(text: str) -> Reference:
    """Parse a reference with or without `oci://`, or `ollama://name:tag`. Raises BadReferenceError."""
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = "oci", text
    if scheme not in {"oci", "ollama"} or not rest.isascii() or not rest.isprintable() or len(text) > TEXT_CHARS_MAX:
        raise build_reference_error(text, "expected oci://registry/repository:tag or ...@sha256:DIGEST")
    name, pinned, digest_text = rest.partition("@")
    try:
        digest = parse_digest(digest_text) if pinned else None
    except BadDigestError:
        raise build_reference_error(
            text, "the text after @ is not a digest: expected sha256: and 64 digits in lower case"
        ) from None
    before, colon, last = name.rpartition(":")
    tag = last if colon and "/" not in last else None
    name = name if tag is None else before
    if tag is not None and not _TAG.fullmatch(tag):
        raise build_reference_error(text, "its tag may have 128 letters, digits, _ . and -, and not begin with . or -")
    registry, repository = _ollama(text, name) if scheme == "ollama" else _oci(text, name)
    if len(registry) + 1 + len(repository) > NAME_CHARS_MAX:
        raise build_reference_error(
            text, f"its registry and repository together have more than {NAME_CHARS_MAX} characters"
        )
    return Reference(registry, repository, tag, digest)


def parse_registry_host(text: str) -> str:
    """Return `Reference.host` for a registry without a repository; accepts `https://`. Raises BadReferenceError."""
    found = _HOST.fullmatch(text.removeprefix("https://").removesuffix("/"))
    if found is None:
        shown = text.rpartition("@")[2][:_SHOWN_CHARS_MAX]
        raise BadReferenceError(f"{shown!r} is not a registry: expected a host, or host:port, such as ghcr.io")
    name = _host(text, found[0])
    return DOCKER_HOST if name in DOCKER_HOSTS else name


def build_reference_error(text: str, fix: str) -> BadReferenceError:
    """Build the error for this text. A part before an @ that may be a password is not shown."""
    scheme, found, rest = text.partition("://")
    authority, slash, path = rest.partition("/") if found else text.partition("/")
    secret = "@" in authority and not re.search(r"@sha(256|512):", authority)
    authority = "..." + authority[authority.rindex("@") :] if secret else authority
    said = (scheme + found if found else "") + authority + slash + path
    return BadReferenceError(f"{said[:_SHOWN_CHARS_MAX]!r} is not a reference to an artifact: {fix}")


def _oci(text: str, name: str) -> tuple[str, str]:
    """Return (registry, repository). As in Docker, the first component is a host if it looks like one."""
    first, slash, rest = name.partition("/")
    is_host = bool(slash) and (any(c in first for c in ".:[") or first == "localhost" or first != first.lower())
    registry = _host(text, first) if is_host else DOCKER
    repository = rest if is_host else name
    if registry in DOCKER_HOSTS:
        registry, repository = DOCKER, repository if "/" in repository else f"library/{repository}"
    if not _REPOSITORY.fullmatch(repository):
        raise build_reference_error(
            text,
            "its repository is invalid: expected parts separated by /, each of lower-case letters and digits with "
            "single . _ or - between them",
        )
    return registry, repository


def _ollama(text: str, name: str) -> tuple[str, str]:
    """Return (registry, repository) of `model`, `space/model` or `host/space/model`; Ollama allows capital letters."""
    parts = name.split("/")
    if len(parts) > 3 or not all(_OLLAMA_NAME.fullmatch(part) for part in parts[-2:]):
        raise build_reference_error(
            text, "expected ollama://model:tag, ollama://owner/model:tag or ollama://host/owner/model:tag"
        )
    registry = _host(text, parts[0]) if len(parts) == 3 else OLLAMA
    return registry, "/".join(parts[-2:]) if len(parts) > 1 else f"library/{parts[0]}"


def _host(text: str, host: str) -> str:
    """Validate the host and optional port, and return them in lowercase."""
    found = _HOST.fullmatch(host)
    if found is None or len(found["name"]) > 253:
        raise build_reference_error(text, "its registry is a host, or host:port; credentials do not belong there")
    if found["port"] is not None and not 0 < int(found["port"]) < 65536:
        raise build_reference_error(text, "its registry's port is not within 1 to 65535")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(found["name"][1:-1])
        except ValueError:
            raise build_reference_error(text, "the text in [] is not an IPv6 address") from None
    return host.lower()
