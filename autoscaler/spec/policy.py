"""The request policy of a Model or Tenant: changes to the members of request bodies, and external checks. Pure.

Owns the typed definition and its rules. `gateway.policy` applies a policy. Names of members are those of the engine's
API (OpenAI or Anthropic), also for requests of Ollama's API, which are translated before the policy is applied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from autoscaler.contract import RESERVED_MEMBERS, same_members
from autoscaler.spec.decode import Part, Path, WrongKeyError

MEMBERS_MAX = 64
"""The maximum number of members in one map or list of a policy."""
VALUE_DEPTH_MAX = 4
"""The maximum depth of a value: a list or map of plain values has depth 1."""
VALUES_BYTES_MAX = 16 << 10
"""The maximum size of all values of a policy as JSON."""
URL_CHARS_MAX = 2048
CHECK_SECONDS_MAX = 60.0
_MEMBER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\[\]-]{0,63}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MEMBER_WANTED = "expected the name of a member at the top level of request bodies: 1 to 64 of A-Za-z0-9_[]-"
_URL_WANTED = "expected a URL such as https://guard.example/check, without user name and fragment"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")

Members = dict[str, object]


class RequestCheck(Part, frozen=True):
    """An HTTP server that allows or rejects each request before it is queued."""

    url: Annotated[str, Meta(min_length=1, max_length=URL_CHARS_MAX)]
    """The URL to which the request is posted."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=CHECK_SECONDS_MAX)] = 5.0
    """The maximum time of the check, in seconds."""
    fail_open: bool = False
    """Whether a failed check allows the request. Otherwise the client gets 503."""


class AnswerCheck(RequestCheck, frozen=True, kw_only=True):
    """An HTTP server that allows or rejects each whole answer. Streams cannot be checked."""

    streams: Literal["reject", "skip"]
    """How requests for a stream are handled. `reject`: they get 400. `skip`: their answers are not checked."""


class RequestPolicy(Part, frozen=True):
    """Changes to the members of request bodies, and external checks."""

    defaults: Members = {}
    """Values of members that a request does not have."""
    forced: Members = {}
    """Values of members, whatever the request has."""
    caps: dict[str, Annotated[float, Meta(ge=0, le=1e15)]] = {}
    """The maximum of numbers that a request has. A larger number is replaced by its maximum."""
    removed: tuple[str, ...] = ()
    """Members that are removed from a request."""
    request_check: RequestCheck | None = None
    """A check before the request is queued. None: no check."""
    answer_check: AnswerCheck | None = None
    """A check of the whole answer before the client gets it. None: no check."""


class ModelPolicy(RequestPolicy, frozen=True):
    """The policy of a Model."""

    forced_by_name: dict[str, Members] = {}
    """Values that override `forced` if a request uses this name, alias or adapter of the Model."""


def check_policy(policy: RequestPolicy, at: Path) -> None:
    """Check a policy. Raises WrongKeyError with a path below `at`."""
    size = _check_values(policy.defaults, (*at, "defaults")) + _check_values(policy.forced, (*at, "forced"))
    if isinstance(policy, ModelPolicy):
        _check_count(policy.forced_by_name, (*at, "forcedByName"))
        for name, members in policy.forced_by_name.items():
            size += _check_values(members, (*at, "forcedByName", name))
    if size > VALUES_BYTES_MAX:
        raise WrongKeyError(at, f"the values have {size} bytes as JSON; expected at most {VALUES_BYTES_MAX}")
    _check_names(policy.caps, (*at, "caps"))
    _check_count(policy.removed, (*at, "removed"))
    for position, name in enumerate(policy.removed):
        _check_name(name, (*at, "removed", position))
    for key, check in (("requestCheck", policy.request_check), ("answerCheck", policy.answer_check)):
        if check is not None:
            check_url(check.url, (*at, key, "url"))


def check_forced_names(policy: ModelPolicy, names: Iterable[str], at: Path) -> None:
    """Check that `forcedByName` names only the Model's own names. Raises WrongKeyError."""
    known = frozenset(names)
    for name in policy.forced_by_name:
        if name not in known:
            raise WrongKeyError((*at, "forcedByName", name), "is not a name of this Model: add it to spec.aliases")


def is_address(text: str) -> bool:
    """Whether the text is an IP address."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def is_network(text: str) -> bool:
    """Whether the text is a network in CIDR notation."""
    try:
        ip_network(text)
    except ValueError:
        return False
    return "/" in text


def _check_count(items: Mapping[str, object] | tuple[str, ...], at: Path) -> None:
    if len(items) > MEMBERS_MAX:
        raise WrongKeyError(at, f"expected at most {MEMBERS_MAX}")


def _check_names(members: Mapping[str, object], at: Path) -> None:
    _check_count(members, at)
    seen: dict[frozenset[str], str] = {}
    for name in members:
        _check_name(name, (*at, name))
        other = seen.setdefault(same_members(name), name)
        if other != name:
            raise WrongKeyError((*at, name), f"has the same meaning as {other}: set only one of them")


def _check_name(name: str, at: Path) -> None:
    if not _MEMBER.fullmatch(name):
        raise WrongKeyError(at, _MEMBER_WANTED)
    if name.casefold() in RESERVED_MEMBERS:
        raise WrongKeyError(at, "a policy cannot change this member, which the gateway itself reads or sets: remove it")


def _check_values(members: Members, at: Path) -> int:
    """Check names and values; return the size of the values as JSON, in bytes."""
    _check_names(members, at)
    for name, value in members.items():
        _check_value(value, (*at, name), VALUE_DEPTH_MAX)
    return len(msgspec.json.encode(members))


def _check_value(value: object, at: Path, depth: int) -> None:
    match value:
        case None | bool():
            return
        case str():
            if not _SURROGATE.search(value):
                return
        case int():
            if -(1 << 63) <= value < 1 << 63:
                return
        case float():
            if math.isfinite(value):
                return
        case list() | dict():
            if depth == 0 and value:
                raise WrongKeyError(at, f"expected a value with at most {VALUE_DEPTH_MAX} nested lists or maps")
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                _check_value(str(key), at, 0)
                _check_value(one, (*at, key), depth - 1)
            return
        case _:
            pass
    raise WrongKeyError(at, "expected a value of JSON: text, a number, true, false, null, a list or a map")


def check_url(url: str, at: Path) -> None:
    """Check an HTTP URL. Raises WrongKeyError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise WrongKeyError(at, _URL_WANTED) from None
    host = parts.hostname or ""
    valid = parts.scheme in {"http", "https"} and "@" not in parts.netloc and "#" not in url and port != 0
    if not valid or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise WrongKeyError(at, _URL_WANTED)
    is_numeric = ":" in host or host.replace(".", "").isdigit()  # some parsers read 127.1 as an address
    if not (is_address(host) if is_numeric else _HOST.fullmatch(host)):
        raise WrongKeyError(at, _URL_WANTED)
