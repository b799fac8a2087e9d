"""Fuzz target for capacity providers' lists: a malformed object of the API server stops no provider.

An input is one byte that selects the provider, one that selects an object of its API server, and the object's new JSON.
With it, the provider lists its orders and its offers. It may raise its documented errors only. The fields of the lists
have the declared types.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any, Final

from autoscaler.providers.kubernetes_access import Object
from autoscaler.providers.provider import RefusedError
from tests.contracts.provider import order
from tests.fuzz.checks.declared_types import misfit
from tests.fuzz.inputs.json_mutations import fits, retyped
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.providers.cro_rig import Rack
from tests.support.harness.providers.provisioning_request_rig import ProvisioningRig
from tests.unit.autoscaler.providers.cluster_autoscaler.test_provider import GroupRig
from tests.unit.autoscaler.providers.karpenter.test_provider import NodesRig
from tests.unit.autoscaler.providers.kueue.test_provider import KueueRig

MAKE: Final[tuple[Callable[[], Any], ...]] = (NodesRig, ProvisioningRig, KueueRig, GroupRig, Rack)


DURATION: Final = '"expireAfter": "720h"'
DURATIONS: Final = ("9" * 5_000 + "h", "9" * 400 + "h", "9" * 15 + "h", "1h" * 2_000, "1h30m", "Never", "h", "-1h")
WORDS: Final = (
    b'"1000000000000000000"', b'"-1"', b'"1k"', b'""', b'"[[[["', b'"{}"', b'"\\u0000"', b'"9999-12-31T23:59:59Z"',
)  # fmt: skip


def _server(rig: Any) -> PlayedServer:
    server: PlayedServer = rig.karpenter if isinstance(rig, NodesRig) else rig.server
    return server


@cache
def known(number: int) -> dict[str, Object]:
    """All objects, by path, when the provider has one order that was delivered and is in use."""
    rig, found = MAKE[number](), dict[str, Object]()

    async def ordered() -> None:
        provider = rig.provider()
        made = order((await provider.offers())[0])
        await provider.acquire(made)
        await rig.until_here(made.id.name)
        found.update(copy.deepcopy(_server(rig).objects))
        rig.use(made.id.name)
        found.update(copy.deepcopy(_server(rig).objects))

    rig.run(ordered())
    return found


def providers(data: bytes) -> None:
    """Read the provider's two lists, with one object replaced."""
    if len(data) < 2:
        return
    number = data[0] % len(MAKE)
    paths = sorted(known(number))
    try:
        found = json.loads(data[2:])
    except (ValueError, RecursionError):
        return
    path = paths[data[1] % len(paths)]
    if not fits(found, known(number)[path]):  # the API server rejects it
        return
    rig = MAKE[number]()

    async def lists() -> None:
        _server(rig).objects = copy.deepcopy(known(number)) | {path: found}
        provider = rig.provider()
        for ask in (provider.list, provider.offers):
            with contextlib.suppress(RefusedError):
                for one in await ask():
                    assert not (wrong := misfit(one)), f"{type(one).__name__} {wrong}"

    rig.run(lists())


def _each() -> Iterator[tuple[int, int, Object]]:
    for number in range(len(MAKE)):
        objects = known(number)
        yield from ((number, at, objects[path]) for at, path in enumerate(sorted(objects)))


def seeds() -> tuple[bytes, ...]:
    """Each object of each provider, unchanged, and with each duration."""
    known = tuple(bytes((number, at)) + json.dumps(one).encode() for number, at, one in _each())
    expiring = [(number, at, one) for number, at, one in _each() if DURATION in json.dumps(one)]
    assert expiring, "no object has an expireAfter"
    return known + tuple(
        bytes((number, at)) + _with_duration(one, duration) for number, at, one in expiring for duration in DURATIONS
    )


def case(random: Random) -> bytes:
    """An object with other texts and numbers, as its schema allows."""
    number, at, one = random.choice(list(_each()))
    if DURATION in json.dumps(one) and random.random() < 0.2:
        return bytes((number, at)) + _with_duration(one, random.choice(DURATIONS))
    return bytes((number, at)) + retyped(one, random)


def _with_duration(one: Object, duration: str) -> bytes:
    """The object with this expireAfter."""
    return json.dumps(one).replace(DURATION, f'"expireAfter": "{duration}"').encode()
