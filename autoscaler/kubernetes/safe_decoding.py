"""Decodes API server responses object by object: an object that cannot be decoded does not affect the others. Pure.

msgspec decodes and skips nested values recursively, so about 1,000 levels anywhere raise RecursionError. The API server
allows 10,000 levels in fields without a schema. Values nested deeper than DEPTH_MAX are therefore cut out of the text
before it is decoded again; the rest identifies the object. The API server also returns unpaired surrogates in fields
without a schema, which msgspec rejects anywhere in a list. They are replaced by U+FFFD, as Go's encoding/json does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from autoscaler.kubernetes.unreadable_objects import Unreadable

Object = dict[str, Any]
"""A decoded API object."""

DEPTH_MAX: Final = 100
"""Maximum nesting of an object, in levels. The types that Kubernetes defines have fewer than 40."""
BYTES_MAX: Final = 4 << 20
"""Maximum size of an object: more than the 1.5 MiB that etcd stores, because JSON is longer than protobuf."""
PART_BYTES_MAX: Final = 4 << 20
"""Maximum size of the objects that are decoded together, unless a single one is larger. Decoded, they may need 20 times
the memory.
"""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TOKEN = re.compile(_STRING.pattern + rb"|[\[\]{}]", re.DOTALL)
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
_BATCH: Final = 128
"""Number of brackets that are checked together. Only their balance is computed if the depth cannot reach the limit."""
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_SURROGATE = re.compile(
    rb"(\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""A backslash or a pair of surrogates, in group 1, or an unpaired surrogate."""
_EVENT = re.compile(rb'\{"type":"([A-Z]{1,32})","object":')
_TYPE = re.compile(rb'"(kind|apiVersion)":"([A-Za-z0-9./-]{1,300})"')
_CUT = b'{"pilotlight.dev/cut":null}'
"""Replaces a value that is nested too deeply."""


T = TypeVar("T")


class ListPage(NamedTuple):
    """One page of a list, or a part of a page."""

    version: str
    """resourceVersion of the list."""
    token: str
    """`continue` token of the next page; empty: this is the last page, or not the last part of one."""
    items: list[Object]
    unreadable: list[Unreadable]
    of: tuple[str, str] = ("", "")
    """API version and kind of each item. Items of built-in kinds do not name them."""


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    version: str = msgspec.field(name="resourceVersion", default="")
    token: str | None = msgspec.field(name="continue", default=None)


class _Identity(msgspec.Struct, frozen=True):
    api_version: str = msgspec.field(name="apiVersion", default="")
    kind: str = ""
    metadata: _Metadata = _Metadata()


class _Managed(msgspec.Struct, frozen=True):
    manager: str = ""
    time: str | None = None
    subresource: str = ""


class _Checked(_Metadata, frozen=True):
    """Metadata fields that watches and readers use; every object that is not Unreadable has these types."""

    uid: str = ""
    generation: int = 0
    generate_name: str = msgspec.field(name="generateName", default="")
    created: str | None = msgspec.field(name="creationTimestamp", default=None)
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owners: list[dict[str, str | bool | None]] | None = msgspec.field(name="ownerReferences", default=None)
    managed: list[_Managed] | None = msgspec.field(name="managedFields", default=None)


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _WholeEvent(msgspec.Struct, frozen=True):
    type: str
    object: Object


class _List(msgspec.Struct, frozen=True):
    api_version: str = msgspec.field(name="apiVersion", default="")
    kind: str = ""
    metadata: _Metadata = _Metadata()
    items: list[msgspec.Raw] | None = None


_decode_object = msgspec.json.Decoder(Object).decode
_decode_identity = msgspec.json.Decoder(_Identity).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_whole_event = msgspec.json.Decoder(_WholeEvent).decode
_decode_list = msgspec.json.Decoder(_List).decode


def is_too_deep(text: bytes, depth_max: int = DEPTH_MAX) -> bool:
    """Whether JSON is nested deeper than `depth_max`.

    It runs for each event of each watch, so it uses few C calls: it removes escapes and all characters except brackets
    and quotes, then strings, and counts the balance of brackets.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = text.translate(None, _NO_MARKS).replace(b'""', b"")
    brackets, depth = b"".join(marks.split(b'"')[::2]), 0
    for begin in range(0, len(brackets), _BATCH):
        batch = brackets[begin : begin + _BATCH]
        opened = batch.count(b"{") + batch.count(b"[")
        if depth + opened > depth_max:
            return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > depth_max
        depth += 2 * opened - len(batch)
    return False


def truncate_nesting(text: bytes, depth_max: int) -> bytes:
    """Replace all values nested deeper than `depth_max`. Unbalanced text stays undecodable."""
    pieces = list[bytes]()
    depth = begin = 0
    for token in _TOKEN.finditer(text):
        step = _STEPS.get(text[token.start()], 0)
        if step > 0 and depth == depth_max:
            pieces.append(text[begin : token.start()])
        elif step < 0 and depth == depth_max + 1:
            pieces.append(_CUT)
            begin = token.end()
        depth += step
    return b"".join(pieces) if depth > depth_max else b"".join((*pieces, text[begin:]))


def replace_unpaired_surrogates(text: bytes) -> bytes:
    """Replace escapes of unpaired surrogates in JSON by U+FFFD."""
    return _SURROGATE.sub(lambda found: found[1] or b"\\ufffd", text)


def _decode_repaired(decode: Callable[[bytes], T], text: bytes, depth_max: int) -> T:
    """Decode text; if that fails, decode it without unpaired surrogates and values nested deeper than `depth_max`."""
    try:
        return decode(text)
    except (ValueError, RecursionError):
        text = replace_unpaired_surrogates(text)
    try:
        return decode(text)
    except RecursionError:
        return decode(truncate_nesting(text, depth_max))


def read_object(raw: bytes, of: tuple[str, str] = ("", "")) -> Object | Unreadable:
    """Decode one object of any size. `of`: API version and kind for a list item, which does not name them itself."""
    if is_too_deep(raw) or _CUT in raw:
        return _unreadable(raw, of, f"its values are nested more than {DEPTH_MAX} levels deep")
    try:
        return _decode_repaired(_decode_object, raw, DEPTH_MAX)
    except (ValueError, RecursionError) as error:
        return _unreadable(raw, of, f"{type(error).__name__}: {error}")


def _read_bounded(raw: bytes, of: tuple[str, str] = ("", "")) -> Object | Unreadable:
    if len(raw) > BYTES_MAX:
        return _unreadable(raw, of, f"it has {len(raw)} bytes, more than {BYTES_MAX}")
    found = read_object(raw, of)
    if not isinstance(found, Unreadable):
        try:
            _check(found)
        except msgspec.ValidationError as error:
            return _unreadable(raw, of, f"its metadata: {error}")
    return found


def read_response(raw: bytes) -> Object | Unreadable:
    """Decode the response to a request for one object. Responses without metadata, such as versions, are allowed."""
    found = read_object(raw)
    if isinstance(found, Unreadable) or "metadata" not in found:
        return found
    try:
        _check(found)
    except msgspec.ValidationError as error:
        return _unreadable(raw, ("", ""), f"its metadata: {error}")
    return found


def _check(found: Object) -> None:
    """Raise msgspec.ValidationError if the metadata has other types than readers expect."""
    msgspec.convert(found.get("metadata"), _Checked)


def _unreadable(raw: bytes, of: tuple[str, str], reason: str) -> Unreadable:
    try:
        found = _decode_repaired(_decode_identity, truncate_nesting(raw, DEPTH_MAX), DEPTH_MAX)
    except (ValueError, RecursionError):
        found = _Identity()
    metadata, (api_version, kind) = found.metadata, of
    return Unreadable(
        found.kind or kind, metadata.namespace, metadata.name, metadata.version, reason,
        found.api_version or api_version, metadata.uid,
    )  # fmt: skip


def read_event(line: bytes) -> tuple[str, Object | Unreadable]:
    """Decode a watch event into its type and object. Raises msgspec.DecodeError if the line is not an event.
    A valid event is decoded once. If that fails, its object is decoded separately to find the name and the error.
    """
    if len(line) <= BYTES_MAX and not is_too_deep(line, DEPTH_MAX + 1) and _CUT not in line:
        try:
            whole = _decode_whole_event(line)
            _check(whole.object)
        except (ValueError, RecursionError):
            pass
        else:
            return whole.type, whole.object
    event = _decode_repaired(_decode_event, line, DEPTH_MAX + 1)
    return event.type, _read_bounded(bytes(event.object))


def read_truncated_event(prefix: bytes, reason: str) -> tuple[str, Unreadable]:
    """Identify the object of a watch event from the beginning of its line. Raises msgspec.DecodeError if it is not the
    beginning of an event.
    """
    event = _EVENT.match(prefix)
    if event is None:
        raise msgspec.DecodeError("it does not begin as an event")
    begin = prefix.find(b'"metadata":', event.end())
    types = {found[1]: found[2].decode("ascii") for found in _TYPE.finditer(prefix, event.end(), max(begin, 0))}
    try:
        text = prefix[begin + len('"metadata":') :].decode(errors="ignore")
        metadata = msgspec.convert(json.JSONDecoder().raw_decode(text)[0], _Metadata)
    except (ValueError, RecursionError):
        metadata = _Metadata()
    return event[1].decode("ascii"), Unreadable(
        types.get(b"kind", ""), metadata.namespace, metadata.name, metadata.version, reason,
        types.get(b"apiVersion", ""), metadata.uid,
    )  # fmt: skip


def read_pages(text: bytes) -> Iterator[ListPage]:
    """Decode one page of a list. A large page is decoded in parts; only the last one has a token. Raises
    msgspec.DecodeError before the first part if the text is not a list.
    """
    found = _decode_repaired(_decode_list, text, DEPTH_MAX + 2)
    page = ListPage(found.metadata.version, "", [], [], (found.api_version, found.kind.removesuffix("List")))
    part_bytes = 0
    for raw in found.items or ():
        encoded = bytes(raw)
        if part_bytes and part_bytes + len(encoded) > PART_BYTES_MAX:
            yield page
            page, part_bytes = page._replace(items=[], unreadable=[]), 0
        part_bytes += len(encoded)
        one = _read_bounded(encoded, page.of)
        if isinstance(one, Unreadable):
            page.unreadable.append(one)
        else:
            page.items.append(one)
    yield page._replace(token=found.metadata.token or "")
