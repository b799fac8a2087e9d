"""Decorators for asynchronous tests that run in virtual time or in a rig instead of on pytest's event loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Protocol, TypeAlias

AsyncTest: TypeAlias = Callable[..., Coroutine[object, object, None]]
"""Its arguments are fixtures and parameters of pytest, except those that a runner provides."""


class AsyncRig(Protocol):
    """An environment that runs an asynchronous test."""

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        """Runs it to its end."""


def run_with(runner: Callable[[Coroutine[object, object, None]], object]) -> Callable[[AsyncTest], Callable[..., None]]:
    """Lets `runner` run the coroutine of the test, for example in virtual time."""

    def decorate(test: AsyncTest) -> Callable[..., None]:
        @functools.wraps(test)
        def synchronous(**fixtures: object) -> None:
            runner(test(**fixtures))

        return synchronous

    return decorate


def call_with(runner: Callable[[AsyncTest], object], provided: int = 1) -> Callable[[AsyncTest], Callable[..., None]]:
    """Lets `runner` call the test with its first `provided` arguments; the other arguments are fixtures."""

    def decorate(test: AsyncTest) -> Callable[..., None]:
        @functools.wraps(test)
        def synchronous(**fixtures: object) -> None:
            runner(functools.partial(test, **fixtures))

        signature = inspect.signature(test)
        fixtures = list(signature.parameters.values())[provided:]
        vars(synchronous)["__signature__"] = signature.replace(parameters=fixtures)  # pytest reads the fixtures here
        return synchronous

    return decorate


def run_in(make_rig: Callable[[], AsyncRig]) -> Callable[[AsyncTest], Callable[..., None]]:
    """Runs the test in a new rig, which is its first argument."""

    def run(test: AsyncTest) -> None:
        rig = make_rig()
        rig.run(test(rig))

    return call_with(run)
