"""Fuzz target for watched objects: values read from an object have their declared types, or the object is skipped.

An input is one byte that selects the watch, and one line: an event. It passes through the real watch of the real owner,
which then uses the watch's values. Only errors that end every watch may be raised.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Final, NamedTuple

from autoscaler.kubernetes import safe_decoding
from tests.fuzz.checks.declared_types import misfit
from tests.fuzz.inputs.json_mutations import VALUES, Written, mutated, retyped, written
from tests.fuzz.inputs.kubernetes_objects import SEEDS as OBJECTS
from tests.fuzz.inputs.kubernetes_objects import Object
from tests.fuzz.inputs.kubernetes_watches import OWNERS, DoneError, LineApi, Made, Owner, recorded
from tests.simulation.environment.virtual_loop import VirtualLoop

EVENTS: Final = (b"ADDED", b"MODIFIED", b"DELETED", b"BOOKMARK", b"ERROR")
CUSTOM: Final = frozenset({"models", "tenants", "scaledobjects", "composabilityrequests", "composableresources"})
"""Kinds whose schema in a cluster may allow anything. For all others the API server enforces the types."""
STATUS: Final[Object] = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old", "metadata": {}}


class Kind(NamedTuple):
    """One watch: its owner, its number among that owner's watches, and the last part of its path."""

    owner: Owner
    position: int
    plural: str


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The virtual-time event loop of the watches: they wait before they retry."""
    made = VirtualLoop()
    atexit.register(made.close)
    return made


@cache
def kinds() -> tuple[Kind, ...]:
    """All watches of the product."""
    return tuple(
        Kind(owner, position, made.path.rpartition("/")[2])
        for owner in OWNERS
        for position, made in enumerate(_made(owner))
    )


def _made(owner: Owner) -> list[Made]:
    with recorded() as made, _quiet():
        loop().run_until_complete(owner(LineApi(b"")))
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log of skipped objects."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def places() -> set[tuple[str, int]]:
    """File and line of the watches in the source that are targets."""
    return {(made.file, made.line) for owner in OWNERS for made in _made(owner)}


def _event(kind: bytes, text: bytes) -> bytes:
    return b'{"type":"' + kind + b'","object":' + text + b"}"


def seeds() -> tuple[bytes, ...]:
    """Each watch with the objects of its kind."""
    return tuple(
        bytes((number,)) + _event(b"ADDED", written(one))
        for number, kind in enumerate(kinds())
        for one in OBJECTS[kind.plural]
    )


WORDS: Final = (
    b'"metadata":{', b'"name":"a"', b'"resourceVersion":"1"', b'"annotations":null', b'"labels":{"a":1}',
    b'"status":null', b'"spec":null',
    b'"type":"ERROR"', b'"type":"BOOKMARK"', b'"code":"x"', b"null", b"[]", b"{}", b"1e999", b"99999999999999999999",
    b'"\\ud800"', b"\xff",
    b'"\\u001b[31m"', b"[[", b"]]", b'{"a":', b"}}",
)  # fmt: skip


def case(random: Random) -> bytes:
    """An event of a watch whose object is changed in a few places."""
    number = random.randrange(len(kinds()))
    event = random.choice((EVENTS[0], EVENTS[0], EVENTS[0], *EVENTS))
    plural = kinds()[number].plural
    known = STATUS if event == b"ERROR" else random.choice(OBJECTS[plural])
    if known.get("metadata", {}).get("annotations") and random.random() < 0.2:
        text = written(_annotated(known, random))
    elif event == b"ERROR" or plural in CUSTOM:
        text = mutated(known, random)
    elif random.random() < 0.4:
        text = written({**known, "metadata": Written(mutated(known["metadata"], random))})
    else:
        text = retyped(known, random)
    return bytes((number,)) + _event(event, text)


def _annotated(known: Object, random: Random) -> Object:
    """The object with another annotation. A JSON annotation is changed as JSON."""
    annotations = dict(known["metadata"]["annotations"])
    name = random.choice(sorted(annotations))
    try:
        before = json.loads(annotations[name])
    except ValueError:
        before = None
    texts = [one for one in VALUES if isinstance(one, str)]
    changed = mutated(before, random).decode("latin-1") if isinstance(before, dict | list) else random.choice(texts)
    return {**known, "metadata": {**known["metadata"], "annotations": annotations | {name: changed}}}


def objects(data: bytes) -> None:
    """One event of one watch, and the same object as a part of a list."""
    if not data:
        return
    kind, line = kinds()[data[0] % len(kinds())], data[1:]
    with _quiet():
        loop().run_until_complete(_run(kind, line))
    try:
        (page,) = safe_decoding.read_pages(
            b'{"kind":"AList","metadata":{},"items":[' + line.partition(b'"object":')[2][:-1] + b"]}"
        )
    except (ValueError, RecursionError):  # as Api.pages
        return
    assert len(page.items) + len(page.unreadable) <= 1 or b'"object":' in line[20:]


async def _run(kind: Kind, line: bytes) -> None:
    faults, api = list[str](), LineApi(line)
    api.unreadable.fault = lambda _, reason: faults.append(reason)
    with recorded() as made:
        use = await kind.owner(api)
    watched = made[kind.position].watched
    with contextlib.suppress(DoneError):
        await watched.run()
    assert not any(faults), faults
    for one in watched.items.values():
        undecoded = getattr(one, "undecoded", None)
        assert undecoded is None, undecoded.reason
        assert not (wrong := misfit(one)), f"{type(one).__name__} {wrong}"
    use()
