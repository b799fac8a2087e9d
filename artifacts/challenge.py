"""What a 401 asks for (`WWW-Authenticate`, RFC 9110, 11.6), and whether its realm may have a login. Pure.

Owns the reading of challenges and the realm policy. The realm is named by whoever answered, and gets the password: so
it is the registry's own host or one of its family, over TLS, or one that a person allowed (CVE-2026-48978).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from yarl import URL

from artifacts.origin import PORTS, address, checked, host_name, origin
from artifacts.refusals import PolicyError

HEADER_CHARS_MAX = 8192
CHALLENGES_MAX = 16
SHARED = frozenset(
    {
        *("amazonaws.com", "azurecr.io", "azure.com", "azurewebsites.net", "cloudapp.net", "windows.net", "on.aws"),
        *("github.io", "gitlab.io", "herokuapp.com", "appspot.com", "onrender.com", "ngrok.io", "nip.io", "sslip.io"),
        *("duckdns.org", "cloudfront.net", "digitaloceanspaces.com", "scw.cloud", "ovh.net", "hf.space", "icr.io"),
        *("svc.cluster.local", "cluster.local", "aliyuncs.com", "myhuaweicloud.com", "tencentcloudcr.com"),
        *("jfrog.io", "cr.yandex", "a.run.app"),
    }
)
"""Under these everybody may have a name, so that two of them are no family. (There is no list of all such.)"""
SHARED_TOPS = frozenset({"app", "dev"})
"""Under most names of these hosting firms give names to everybody."""
_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf'({_WORD})[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|({_WORD}))')
_SCHEME = re.compile(rf"({_WORD})(?=[ \t]|,|$)(?![ \t]*=)")
_TOKEN68 = re.compile(r"[A-Za-z0-9._~+/-]+=*(?=[ \t]*(?:,|$))")
_GAP = re.compile(r"[ \t,]*")


class Challenge(NamedTuple):
    """One way to log in."""

    scheme: str
    """In lower case."""
    parameters: Mapping[str, str]
    """By names in lower case."""


def challenges(headers: Sequence[str]) -> list[Challenge]:
    """All of them in order; what comes after something that cannot be read is left out."""
    found: list[Challenge] = []
    for header in headers[:CHALLENGES_MAX]:
        found += _challenges(header[:HEADER_CHARS_MAX])
    return found[:CHALLENGES_MAX]


def _challenges(text: str) -> list[Challenge]:
    found: list[Challenge] = []
    parameters: dict[str, str] = {}
    at = _gap(text, 0)
    while at < len(text):
        if found and (one := _PARAMETER.match(text, at)) is not None:
            value = one[3] if one[2] is None else re.sub(r"\\(.)", r"\1", one[2])
            parameters.setdefault(one[1].lower(), value)
            at = _gap(text, one.end())
        elif (scheme := _SCHEME.match(text, at)) is not None:
            parameters = {}
            found.append(Challenge(scheme[1].lower(), parameters))
            at = _gap(text, scheme.end())
            if _PARAMETER.match(text, at) is None and (token := _TOKEN68.match(text, at)) and "=" in token[0]:
                at = _gap(text, token.end())
        else:
            break
    return found


def _gap(text: str, at: int) -> int:
    found = _GAP.match(text, at)
    return at if found is None else found.end()


def realm(text: str, registry: URL, allowed: Collection[str] = ()) -> URL:
    """The realm as a URL that may be asked with the registry's login. Raises PolicyError.

    `allowed`: hosts, or HOST:PORT, that a person trusts with it.
    """
    said, url = origin(registry), checked(text)
    asked = origin(url)
    if asked == said:
        return url
    named = {one.lower() for one in allowed}
    trusted = f"{asked.host}:{asked.port}" in named or str(asked) in named
    if url.scheme != "https" and not (said.scheme == "http" and trusted):
        raise PolicyError(f"{said}: its realm is not https; no login is sent there")
    if trusted:
        return url
    kin = asked.host == said.host or (address(asked.host) is None and related(said.host, asked.host))
    if not kin or asked.port not in {said.port, PORTS["https"]}:
        raise PolicyError(
            f"{said}: its realm is at {asked}, which is somebody else as far as one can tell; "
            f"allow that host for this registry where it is right"
        )
    return url


def related(registry: str, other: str) -> bool:
    """One is the other's parent, or both have one: `registry-1.docker.io` and `auth.docker.io`."""
    registry, other = host_name(registry), host_name(other)
    if address(registry) is not None or address(other) is not None:
        return registry == other
    parents = {registry, registry.partition(".")[2]}
    return any(_owned(one) and (other == one or other.endswith("." + one)) for one in parents)


def _owned(domain: str) -> bool:
    """Whether one party has all names under it: no top level, `co.uk`, or place where everybody has names."""
    labels = domain.split(".")
    if len(labels) < 2 or domain in SHARED or (len(labels) == 2 and labels[1] in SHARED_TOPS):
        return False
    if any(domain.endswith("." + one) for one in ("amazonaws.com", "aliyuncs.com", "myhuaweicloud.com")):
        return False  # regions of a cloud
    return len(labels) > 2 or len(labels[-1]) > 2 or len(labels[-2]) > 3
