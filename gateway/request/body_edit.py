"""What is read from a body, and the few edits made to it: named top-level members, nothing else (interfaces, section
3). Pure.

Promises: a body is read in one way only. Keys are compared decoded, a top-level member that comes twice is refused,
and so is what is not UTF-8 or not JSON. What is not edited stays byte for byte. Work is linear in the body, and
bounded where many tiny members would make it slow. It must not look into messages, and never dereferences anything.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from gateway.errors import CallError, invalid_request, unsupported_media_type
from gateway.http.body import Body, ChunkedBody, StreamingBody
from gateway.http.json_types import LargeMembers
from gateway.request import forbidden_fields
from gateway.request.api_routes import Operation
from gateway.request.json_scanner import MEMBERS_MAX, JsonScan
from gateway.request.multipart import Form, edit_multipart, read_multipart, scan_multipart

__all__ = ["Form", "Peek", "edit_body", "edit_json", "edit_multipart", "read_body", "read_json", "read_multipart"]

_COLONS_MAX = 20_000
"""A body with more is only taken apart when most of them are inside the members that may be large."""


class Peek:
    """What we know of a JSON body."""

    __slots__ = ("body", "body_model", "members", "model", "stream", "wants_usage")

    def __init__(  # noqa: PLR0917  one per Call: keywords would cost as much again
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
        """The model asked for: the path's, the body's, or the header's."""
        self.stream = stream
        self.wants_usage = wants_usage
        """The client itself set `stream_options.include_usage`; if not, the added chunk is removed from the answer."""
        self.body_model = body_model
        """What the body itself says; None where only the path or a header named the model."""
        self.members = members
        """All top-level members in order, by decoded name; of a large body only those that we read."""


_MEMBERS = msgspec.json.Decoder(dict[str, Raw])
_LARGE = msgspec.json.Decoder(LargeMembers)
_TEXT = msgspec.json.Decoder(str)
_USAGE = frozenset({"include_usage"})
_JSON_TYPE = re.compile(rb'application/json(?:[ \t]*;[ \t]*charset="?utf-?8"?)?', re.IGNORECASE)
_MEMBER = re.compile(rb'[ \t\r\n]*("(?:[^"\\]++|\\.)*+")[ \t\r\n]*:[ \t\r\n]*')
_MEMBER_END = re.compile(rb"[ \t\r\n]*([,}])")


def start_scan(operation: Operation, pieces: ChunkedBody, content_type: bytes) -> None:
    """Lets a large body be read while it arrives, if it can be read at all."""
    if content_type == b"application/json" or _JSON_TYPE.fullmatch(content_type):
        pieces.scan = JsonScan(pieces.parts)
    elif operation.multipart and content_type[:19].lower() == b"multipart/form-data":
        scan_multipart(pieces, content_type)


def check_media(operation: Operation, content_type: bytes) -> None:
    """Raises 415 for what the path does not take."""
    multipart = operation.multipart and content_type[:19].lower() == b"multipart/form-data"
    if not multipart and _JSON_TYPE.fullmatch(content_type) is None:
        raise unsupported_media_type()


def read_body(operation: Operation, body: Body, content_type: bytes, header_model: str | None = None) -> Peek | Form:
    """The body of a Call, by its media type. Raises 415 for what the path does not take, 400 for what is unreadable."""
    if content_type == b"application/json" or _JSON_TYPE.fullmatch(content_type):
        if not isinstance(body, StreamingBody):
            return read_json(body, path_model=operation.model, header_model=header_model)
    elif operation.multipart and content_type[:19].lower() == b"multipart/form-data":
        return read_multipart(body, content_type, path_model=operation.model, header_model=header_model)
    raise unsupported_media_type()


def edit_body(
    operation: Operation, peek: Peek | Form, served_name: str, cache_salt: str | None = None, lora: str = ""
) -> Body:
    """The body as the engine gets it: its own name for the model, usage asked for where streams can tell it, and whose
    prefix cache it may use, where the engine asks and the path takes that. `lora` says which adapters apply: raises 400
    where the path takes none of that.
    """
    if lora and not operation.salted:
        raise invalid_request(
            "this model has adapters, and its engine cannot tell them apart on this path", param="model"
        )
    if isinstance(peek, Form):
        return edit_multipart(peek, model=served_name)
    salt = cache_salt if operation.salted else None
    return edit_json(peek, model=served_name, include_usage=operation.usage, cache_salt=salt, lora=lora)


def read_json(body: bytes | ChunkedBody, *, path_model: str | None = None, header_model: str | None = None) -> Peek:
    """Reads `model`, `stream` and `stream_options.include_usage`. The path's model overrules the body's (Azure's
    clients send both); the header's must equal it. Raises 400 saying what to fix.
    """
    if isinstance(body, bytes):
        members = _members(body)
        forbidden_fields.check_members(members)
    else:
        members = _scanned(body)
    raw = members.get("model")
    body_model = None if raw is None else _model(raw)
    model = chosen_model(body_model, path_model, header_model)
    raw = members.get("stream")
    stream = raw is not None and _flag(raw, "stream")
    raw = members.get("stream_options")
    usage = stream and raw is not None and _asks_usage(raw)
    if raw is not None and not stream:
        _check_unused(raw)
    return Peek(body, model, stream, usage, body_model, members)


def edit_json(
    peek: Peek, *, model: str | None, include_usage: bool, cache_salt: str | None = None, lora: str = ""
) -> Body:
    """The body with `model` set, usage asked for if it streams, our `cache_salt`, or none, for the client's, and `lora`
    where it is not empty (a client's own was refused).

    The same object when nothing changes; else the members are joined anew, their values byte for byte.
    """
    renamed = model is not None and model != peek.body_model
    asking = include_usage and peek.stream and not peek.wants_usage
    edits: dict[str, bytes | None] = {}
    if renamed:
        edits["model"] = msgspec.json.encode(model)
    if asking:
        edits["stream_options"] = _with_usage(peek.members.get("stream_options"))
    if cache_salt or "cache_salt" in peek.members:
        edits["cache_salt"] = msgspec.json.encode(cache_salt) if cache_salt else None
    if lora:
        edits["lora"] = lora.encode()
    if not edits:
        return peek.body
    if not isinstance(peek.body, bytes):
        return _spliced(peek.body, edits)
    edited: dict[str, Raw | bytes] = {**peek.members}
    for name, value in edits.items():
        if value is None:
            del edited[name]
        else:
            edited[name] = value
    return _join(edited)


def _scanned(body: ChunkedBody) -> dict[str, Raw]:
    """The members that we read of a large body."""
    found = body.scan = body.scan if isinstance(body.scan, JsonScan) else JsonScan(body.parts)
    found.check(len(body))
    forbidden_fields.check_members(found.names)
    return {name: Raw(value) for name, value in found.values.items()}


def _spliced(body: ChunkedBody, edits: dict[str, bytes | None]) -> Body:
    """A large body with these edits: cut where they are, everything else as it came."""
    if not isinstance(body.scan, JsonScan):
        raise TypeError("this body was not read as JSON")
    return body.edited(body.scan.splices(edits))


def chosen_model(body_model: str | None, path_model: str | None, header_model: str | None) -> str:
    """The one model that is meant (interfaces, section 3)."""
    model = path_model or body_model or header_model
    if not model:
        raise invalid_request("name the model in the top-level member model", param="model")
    if header_model is not None and header_model != model:
        raise invalid_request("header x-model and the body name different models; send one of them", param="model")
    return model


def _members(body: bytes) -> dict[str, Raw]:
    """The top-level members, proven to be UTF-8 and to come once each."""
    try:
        if not body.isascii():
            body.decode()
        if len(body) > _COLONS_MAX and body.count(b":") > _COLONS_MAX:
            _check_breadth(body)
        members = _MEMBERS.decode(body)
    except msgspec.ValidationError:
        raise invalid_request("the body must be one JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid_request("the body is not valid JSON in UTF-8") from None
    except RecursionError:
        raise invalid_request("the body is nested too deeply") from None
    count = len(members)
    if count > MEMBERS_MAX:
        raise _too_broad()
    # Without white space, escapes in names and repeated members the body is exactly this long; any of them adds to it.
    excess = len(body) - len("".join(members)) - sum(map(len, members.values())) - 4 * count - 1
    if excess and not (excess == 2 * count - 1 and _spaced(members) == body):
        _check_once(body, members)
    return members


def _spaced(members: dict[str, Raw]) -> bytes:
    """The object as Python's json writes it. A body equal to this has these members and no others."""
    return b"{%b}" % b", ".join([b'"%b": %b' % (name.encode(), value) for name, value in members.items()])


def _check_once(body: bytes, members: dict[str, Raw]) -> None:
    """Walks the members as they stand. Where one is repeated, `members` holds the last value, so an earlier one
    either differs from it or is followed by a name that was seen. Two values that begin at one place cannot be
    prefixes of each other and both end there, so comparing bytes is enough. Whoever cannot be followed is refused.
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
    """Refuses what would be an endless dict: every member has a colon, so those outside the large members bound it."""
    large = _LARGE.decode(body)
    inside = sum(bytes(getattr(large, name)).count(b":") for name in LargeMembers.__struct_fields__)
    if body.count(b":") - inside > _COLONS_MAX:
        raise _too_broad()


def _repeated() -> CallError:
    return invalid_request("a top-level member of the body comes more than once; send it once")


def _too_broad() -> CallError:
    return invalid_request(f"the body has more than {MEMBERS_MAX} top-level members, or too many small values in one")


def _model(raw: Raw) -> str:
    try:
        return _TEXT.decode(raw)
    except msgspec.DecodeError:
        raise invalid_request("model must be a string", param="model") from None


def _flag(raw: Raw, name: str) -> bool:
    value = bytes(raw)
    if value in (b"false", b"null"):
        return False
    if value != b"true":
        raise invalid_request(f"{name} must be true or false", param=name)
    return True


def _options(raw: Raw) -> dict[str, Raw]:
    """`stream_options` as members; null is none."""
    if bytes(raw) == b"null":
        return {}
    try:
        members = _members(bytes(raw))
    except CallError:
        raise invalid_request(
            "stream_options must be an object whose members come once", param="stream_options"
        ) from None
    forbidden_fields.check_case(members, _USAGE)
    return members


def _check_unused(raw: Raw) -> None:
    """`stream_options` of a Call that does not stream may be anything, but its names must be unambiguous."""
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
    """One JSON object in its shortest form."""
    if "".join(members).isidentifier():  # no name can need an escape
        parts = [b'"%b":%b' % (name.encode(), value) for name, value in members.items()]
    else:
        parts = [b"%b:%b" % (msgspec.json.encode(name), value) for name, value in members.items()]
    return b"{%b}" % b",".join(parts)
