"""Starts that were refused, for reasons that no other start of the same spec can do anything about: no storm of tries.

Owns for how long that is in the way of the next ones: REFUSED_S, or until a ResourceQuota or a LimitRange of the
namespace changes. Time is an argument.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from autoscaler.contract import ModelName
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.watching import Change, Watched
from autoscaler.spec.model import Model

REFUSED_S = 60.0
POLICIES: Final = ("resourcequotas", "limitranges")


class Refused:
    """The last such reason of each Model."""

    def __init__(self) -> None:
        self._known: dict[ModelName, tuple[str, float, str]] = {}
        """Model -> (spec hash, until when, why)."""

    def note(self, model: ModelName, spec_hash: str, reason: str, now_s: float) -> None:
        """A start of that spec was refused."""
        self._known[model] = (spec_hash, now_s + REFUSED_S, reason)

    def reason(self, model: Model, now_s: float) -> str:
        """What stands in the way of it as it is now; empty: nothing is known."""
        spec_hash, until_s, reason = self._known.get(model.name, ("", 0.0, ""))
        return reason if spec_hash == model.spec_hash() and now_s < until_s else ""

    def forget(self) -> None:
        """What is allowed has changed."""
        self._known.clear()


class Policies:
    """Watches the ResourceQuotas and LimitRanges of a namespace. `changed` is called when what one allows changes; how
    much of a quota is used does not matter here.
    """

    def __init__(self, api: Api, namespace: str, changed: Callable[[], None]) -> None:
        def hear(_: list[Change[Object]]) -> None:
            changed()

        self._watches = [
            Watched(api, f"/api/v1/namespaces/{namespace}/{kind}", _spec, hear, optional=True) for kind in POLICIES
        ]

    async def run(self) -> None:
        """Until cancelled. Without the rights for it a refusal lasts REFUSED_S."""
        async with asyncio.TaskGroup() as tasks:
            for watched in self._watches:
                tasks.create_task(watched.run())


def _spec(found: Object) -> Object:
    spec: Object = found["spec"]
    return spec
