"""Decorators that make a test of a coroutine function which does not run on the event loop of pytest."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
Test = TypeVar("Test", bound=Callable[..., None])


class Runs(Protocol):
    """Runs a scenario to its end, in real or virtual time."""

    def run(self, scenario: Coroutine[object, object, None]) -> None: ...


def run_on_rig(scenario: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """Runs the scenario with its own parameter `rig`."""
    parameters = signature(scenario)

    @wraps(scenario)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        rig: Runs = parameters.bind(*args, **kwargs).arguments["rig"]
        rig.run(scenario(*args, **kwargs))

    return test


def hide_parameters(test: Test, scenario: Callable[..., Any], count: int) -> Test:
    """Hides the first parameters of the scenario, which the test passes, from pytest, which passes the others."""
    whole = signature(scenario)
    test.__signature__ = whole.replace(parameters=[*whole.parameters.values()][count:])  # type: ignore[attr-defined]  # typeshed does not declare it
    return test
