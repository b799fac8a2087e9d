"""The data plane's tests once more on uvloop, which serves in production and closes and resets in its own way."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from tests.wire import test_edge as edge
from tests.wire import test_faults as faults
from tests.wire import test_large as large
from tests.wire import test_leaks as leaks
from tests.wire import test_outlet as outlet
from tests.wire import test_relay as relay

PLAIN = {
    name: test
    for module in (edge, faults, large, leaks, outlet, relay)
    for name, test in vars(module).items()
    if name.startswith("test_") and inspect.iscoroutinefunction(test) and not inspect.signature(test).parameters
}
LEAVING = [(script, how) for script in range(len(faults.LEAVING)) for how in ("reset", "end", "half")]


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


@pytest.mark.parametrize("name", PLAIN)
def test_on_uvloop(name: str) -> None:
    run(PLAIN[name])


@pytest.mark.parametrize(("script", "how"), LEAVING)
def test_leaving_on_uvloop(script: int, how: str) -> None:
    run(lambda: faults.test_a_client_that_leaves_ends_the_engines_work_at_once(faults.LEAVING[script], how))


@pytest.mark.parametrize("script", range(len(faults.BEFORE)))
def test_death_before_the_first_byte_on_uvloop(script: int) -> None:
    run(
        lambda: faults.test_death_before_the_first_body_byte_moves_the_call_and_the_client_sees_nothing(
            faults.BEFORE[script]
        )
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["leaves", "granted"])
def test_leaving_at_the_grant_on_uvloop(first: str, stream: bool) -> None:
    run(lambda: leaks.test_a_client_leaves_just_as_its_call_is_granted(first, stream))


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("first", ["closes", "call"])
def test_closing_what_is_taken_on_uvloop(first: str, how: str) -> None:
    run(lambda: leaks.test_an_engine_closes_a_kept_connection_just_as_it_is_taken(first, how))
