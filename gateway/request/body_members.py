"""Reads and edits named top-level members of a request body, nothing else (interfaces, section 3). Pure.

An accepted body is unambiguous: keys are compared decoded, and repeated top-level members, invalid UTF-8 and invalid
JSON are rejected. Unedited parts are unchanged byte for byte. The work is linear in the size of the body, and bounded
where many tiny members would make it slow. Messages are never inspected, and no URL is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import msgspec
from msgspec import Raw

from gateway.errors import CallError, invalid_request, unsupported_media_type
from gateway.http.body_buffers import Body, ChunkedBody, StreamingBody, copy_range
from gateway.http.json_structs import LargeMembers
from gateway.policy.request_policy import Policy
from gateway.request import forbidden_fields, media_types
from gateway.request.api_routes import Operation
from gateway.request.json_scanner import MEMBERS_MAX, JsonScan
from gateway.request.multipart import Form, edit_multipart, read_multipart, scan_multipart

__all__ = ["Form", "Peek", "edit_body", "edit_json", "edit_multipart", "read_body", "read_json", "read_multipart"]

_COLONS_MAX: Final = 20_000
"""A body with more colons is parsed only if at most this many are outside the members that may be large."""


class Peek:
    """The members of a JSON body that the gateway reads."""

    __slots__ = ("body", "body_model", "members", "model", "stream", "wants_usage")

    def __init__(  # noqa: PLR0917  one per request: keywords would double the cost
        self,
        body: bytes | ChunkedBody,
        model: str,
        stream: bool,
        wants_usage: bool,
        body_model: str | None,
        members: dict[str, Raw],
    ) -> None:
        self.body = body
        self.model = model
        """The requested model: from the path, the body, or the header."""
        self.stream = stream
        self.wants_usage = wants_usage
        """Whether the client set `stream_options.include_usage`. If not, the gateway drops the usage chunk."""
        self.body_model = body_model
        """The model named in the body; None if it names none, or null."""
        self.members = members
        """All top-level members in order, by decoded name; for a large body only those that the gateway reads."""


_MEMBERS: Final = msgspec.json.Decoder(dict[str, Raw])
_LARGE = msgspec.json.Decoder(LargeMembers)
_TEXT: Final = msgspec.json.Decoder(str)
_USAGE = frozenset({"include_usage"})
_UNWATCHED: Final = frozenset[str]()
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Some clients write it before JSON. Parsers differ on it, so engines never get it."""
_BEGIN_BYTES = 4 << 10
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+\{")
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
"""In a text without escaped backslashes."""
_MEMBER = re.compile(rb'[ \t\r\n]*("(?:[^"\\]++|\\.)*+")[ \t\r\n]*:[ \t\r\n]*')
_MEMBER_END = re.compile(rb"[ \t\r\n]*([,}])")


def start_scan(
    operation: Operation, pieces: ChunkedBody, content_type: bytes, watched: frozenset[str] = _UNWATCHED
) -> None:
    """Start reading a large body while it arrives. `watched`: members that a policy may change."""
    if not media_types.is_form(content_type):
        pieces.scan = JsonScan(pieces.parts, watched)
    elif operation.multipart:
        scan_multipart(pieces, content_type)


def read_body(  # noqa: PLR0917  one per request: keywords would cost more
    operation: Operation, body: Body, content_type: bytes, header_model: str | None = None, default_model: str = "",
    watched: frozenset[str] = _UNWATCHED,
) -> Peek | Form:  # fmt: skip
    """Read a body: a form if the content type says so, otherwise JSON. `default_model` is used if the request names
    none. `watched`: members that a policy may change.

    Raises 415 for a form on a path that accepts none, and for a body that is neither a form nor called JSON nor an
    object; 400 if the body is malformed.
    """
    if content_type != b"application/json":
        if media_types.is_form(content_type):
            if operation.multipart:
                return read_multipart(
                    body, content_type, path_model=operation.model, header_model=header_model,
                    default_model=default_model,
                )  # fmt: skip
            raise unsupported_media_type()
        if not media_types.is_json(content_type) and not _begins_object(body):
            raise unsupported_media_type()
    if isinstance(body, StreamingBody):
        raise TypeError("only a form is read while it is forwarded")
    return read_json(
        body, path_model=operation.model, header_model=header_model, default_model=default_model, watched=watched
    )


def _begins_object(body: Body) -> bool:
    begin = body[:_BEGIN_BYTES] if isinstance(body, bytes) else copy_range(body.parts, 0, _BEGIN_BYTES)
    return _OBJECT.match(begin) is not None


def edit_body(
    operation: Operation, peek: Peek | Form, served_name: str, cache_salt: str | None = None, lora: str = "",
    *, include_usage: bool = True, policy: Policy | None = None,
) -> Body:  # fmt: skip
    """Return the body for the engine, with its model name, usage requested for streams if it can be, and a cache salt.
    The salt is set only if the engine supports it and the path allows it. `lora` selects adapters: raises 400 if the
    path does not support that. `policy` changes further members: raises 400 if it rejects one.
    """
    if lora and not operation.salted:
        raise invalid_request("this model has adapters, which its engine cannot select on this path", param="model")
    if isinstance(peek, Form):
        return edit_multipart(peek, model=served_name, engine_path=operation.engine_path, policy=policy)
    salt = cache_salt if operation.salted else None
    edits = None if policy is None else policy.edits(operation.engine_path, member_names(peek), peek.members)
    return edit_json(
        peek, model=served_name, include_usage=include_usage and operation.usage, cache_salt=salt, lora=lora, more=edits
    )


def member_names(peek: Peek) -> Collection[str]:
    """Return the names of all top-level members."""
    body = peek.body
    return peek.members if isinstance(body, bytes) or not isinstance(body.scan, JsonScan) else body.scan.names


def read_json(
    body: bytes | ChunkedBody, *, path_model: str | None = None, header_model: str | None = None,
    default_model: str = "", watched: frozenset[str] = _UNWATCHED,
) -> Peek:  # fmt: skip
    """Read `model`, `stream` and `stream_options.include_usage`. Raises CallError 400.

    A model in the path overrides the one in the body (Azure's clients send both). A model in the header must be the
    same as the resulting one.
    """
    if isinstance(body, bytes):
        if body and body[0] == BYTE_ORDER_MARK[0]:
            body = body.removeprefix(BYTE_ORDER_MARK)
        members = _members(body)
        forbidden_fields.check_members(members, members)
    else:
        members = _scanned(body, watched)
    raw = members.get("model")
    body_model = None if raw is None else _model(raw)
    model = chosen_model(body_model, path_model, header_model, default_model)
    raw = members.get("stream")
    stream = raw is not None and _flag(raw, "stream")
    raw = members.get("stream_options")
    usage = stream and raw is not None and _asks_usage(raw)
    if raw is not None and not stream:
        _check_unused(raw)
    return Peek(body, model, stream, usage, body_model, members)


def edit_json(
    peek: Peek, *, model: str | None, include_usage: bool, cache_salt: str | None = None, lora: str = "",
    more: dict[str, bytes | None] | None = None,
) -> Body:  # fmt: skip
    """Return the body with `model`, `cache_salt` and `lora` set, and usage requested if it streams.

    `more`: other members to set or to remove (None). Without a `cache_salt`, the client's is removed. The same object
    if nothing changes; otherwise the members are joined again, with unchanged values.
    """
    renamed = model is not None and model != peek.body_model
    asking = include_usage and peek.stream and not peek.wants_usage
    edits: dict[str, bytes | None] = {} if more is None else more
    if renamed:
        edits["model"] = msgspec.json.encode(model)
    if asking:
        edits["stream_options"] = _with_usage(peek.members.get("stream_options"))
    if cache_salt or "cache_salt" in peek.members:
        edits["cache_salt"] = msgspec.json.encode(cache_salt) if cache_salt else None
    if lora:
        edits["lora"] = lora.encode()
    if not isinstance(peek.body, bytes):
        return _spliced(peek.body, edits)
    if not edits:
        return peek.body
    edited: dict[str, Raw | bytes] = {**peek.members}
    for name, value in edits.items():
        if value is None:
            del edited[name]
        else:
            edited[name] = value
    return _join(edited)


def _scanned(body: ChunkedBody, watched: frozenset[str]) -> dict[str, Raw]:
    """Return the members of a large body that the gateway reads, and those that a policy may change."""
    scan = body.scan
    if not isinstance(scan, JsonScan) or not scan.recorded >= watched:  # a policy changed while the body arrived
        scan = JsonScan(body.parts, watched)
    found = body.scan = scan
    found.check(len(body))
    forbidden_fields.check_members(found.names, found.values)
    return {name: Raw(value) for name, value in found.values.items()}


def _spliced(body: ChunkedBody, edits: dict[str, bytes | None]) -> Body:
    """Return a large body with these edits, otherwise unchanged."""
    if not isinstance(body.scan, JsonScan):
        raise TypeError("this body was not read as JSON")
    splices = body.scan.splices(edits)
    return body.edited(splices) if splices else body


def chosen_model(
    body_model: str | None, path_model: str | None, header_model: str | None, default_model: str = ""
) -> str:
    """Return the requested model (interfaces, section 3)."""
    model = path_model or body_model or header_model or default_model
    if not model:
        raise invalid_request("name the model in the top-level member model", param="model")
    if header_model is not None and header_model != model:
        raise invalid_request("header x-model and the body name different models; send one of them", param="model")
    return model


def _members(body: bytes) -> dict[str, Raw]:
    """Return the top-level members; checked to be UTF-8 and not repeated."""
    try:
        if not body.isascii():
            body.decode()
        if len(body) > _COLONS_MAX and body.count(b":") > _COLONS_MAX:
            _check_breadth(body)
        members = _MEMBERS.decode(body)
    except msgspec.ValidationError:
        raise invalid_request("the body must be one JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _members_with_surrogates(body)
    except RecursionError:
        raise invalid_request("the body is nested too deeply; nest fewer lists and objects") from None
    count = len(members)
    if count > MEMBERS_MAX:
        raise _too_broad()
    # Bytes beyond the shortest form: white space, escapes in names, or repeated members.
    excess = len(body) - len("".join(members)) - sum(map(len, members.values())) - 4 * count - 1
    if excess and not (excess == 2 * count - 1 and _spaced(members) == body):
        _check_once(body, members)
    return members


def replace_lone_surrogates(body: bytes) -> bytes:
    """Return a JSON text of the same length with U+FFFD for each escaped lone surrogate, which msgspec rejects."""
    if (b"\\ud" not in body and b"\\uD" not in body) or b"\0" in body:
        return body
    return _LONE_SURROGATE.sub(b"\\\\ufffd", body.replace(b"\\\\", b"\0\0")).replace(b"\0\0", b"\\\\")


def _members_with_surrogates(body: bytes) -> dict[str, Raw]:
    """Do the same for a body with escapes of lone surrogates, which msgspec rejects. The values keep them.

    In names they are rejected.
    """
    changed = replace_lone_surrogates(body)
    if changed == body:
        raise _invalid()
    members = _members(changed)
    at = changed.index(b"{") + 1
    found: dict[str, Raw] = {}
    while (match := _MEMBER.match(changed, at)) is not None:
        start = match.end()
        key = match[1]
        if body[match.start(1) : match.end(1)] != key:
            raise _invalid()
        name = _TEXT.decode(key)
        end = start + len(bytes(members[name]))
        found[name] = Raw(body[start:end])
        after = _MEMBER_END.match(changed, end)
        if after is None or after[1] == b"}":
            break
        at = after.end()
    return found


def _spaced(members: dict[str, Raw]) -> bytes:
    """Return the object as Python's json writes it. A body equal to this has these members and no others."""
    return b"{%b}" % b", ".join([b'"%b": %b' % (name.encode(), value) for name, value in members.items()])


def _check_once(body: bytes, members: dict[str, Raw]) -> None:
    """Walk the members in order and reject repeated ones.

    If a member is repeated, `members` holds only its last value. The walk then finds an earlier value that differs, or
    the same name a second time. A value in `members` cannot match only the beginning of a longer value and be followed
    by `,` or `}`, so it is enough to compare bytes. If the walk cannot continue, the body is rejected.
    """
    at = body.index(b"{") + 1
    seen: set[str] = set()
    while (match := _MEMBER.match(body, at)) is not None:
        key = match[1]
        name = _TEXT.decode(key) if b"\\" in key else key[1:-1].decode()
        value = bytes(members.get(name, b""))
        end = _MEMBER_END.match(body, match.end() + len(value))
        if name in seen or end is None or not body.startswith(value, match.end()):
            raise _repeated()
        seen.add(name)
        at = end.end()
        if end[1] == b"}":
            break
    if len(seen) != len(members):
        raise _repeated()


def _check_breadth(body: bytes) -> None:
    """Reject a body with too many members. Each member has a colon, so the number of colons outside the large members
    is an upper bound of the number of members.
    """
    large = _LARGE.decode(body)
    inside = sum(bytes(getattr(large, name)).count(b":") for name in LargeMembers.__struct_fields__)
    if body.count(b":") - inside > _COLONS_MAX:
        raise _too_broad()


def _invalid() -> CallError:
    return invalid_request("the body is not valid JSON in UTF-8")


def _repeated() -> CallError:
    return invalid_request("a top-level member of the body occurs more than once; send it once")


def _too_broad() -> CallError:
    return invalid_request(
        f"the body has more than {MEMBERS_MAX} top-level members, or too many small values in one; send fewer"
    )


def _model(raw: Raw) -> str | None:
    try:
        return _TEXT.decode(raw)
    except msgspec.DecodeError:
        if bytes(raw) == b"null":
            return None
        raise invalid_request("model must be a string", param="model") from None


def _flag(raw: Raw, name: str) -> bool:
    value = bytes(raw)
    if value in (b"false", b"null"):
        return False
    if value != b"true":
        raise invalid_request(f"{name} must be true or false", param=name)
    return True


def _options(raw: Raw) -> dict[str, Raw]:
    """Return the members of `stream_options`; empty for null."""
    if bytes(raw) == b"null":
        return {}
    try:
        members = _members(bytes(raw))
    except CallError:
        raise invalid_request(
            "stream_options must be an object whose members occur once", param="stream_options"
        ) from None
    forbidden_fields.check_case(members, _USAGE)
    return members


def _check_unused(raw: Raw) -> None:
    """Without streaming, `stream_options` may be anything, but its names must be unambiguous."""
    try:
        names = _MEMBERS.decode(raw)
    except msgspec.ValidationError:
        return
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid_request("stream_options is not valid JSON", param="stream_options") from None
    forbidden_fields.check_case(names, _USAGE)


def _asks_usage(raw: Raw) -> bool:
    asked = _options(raw).get("include_usage")
    return asked is not None and _flag(asked, "stream_options.include_usage")


def _with_usage(raw: Raw | None) -> bytes:
    if raw is None:
        return b'{"include_usage":true}'
    return _join(_options(raw) | {"include_usage": b"true"})


def _join(members: dict[str, Raw | bytes]) -> bytes:
    """Return a JSON object in its shortest form."""
    if "".join(members).isidentifier():  # no name needs an escape
        parts = [b'"%b":%b' % (name.encode(), value) for name, value in members.items()]
    else:
        parts = [b"%b:%b" % (msgspec.json.encode(name), value) for name, value in members.items()]
    return b"{%b}" % b",".join(parts)
