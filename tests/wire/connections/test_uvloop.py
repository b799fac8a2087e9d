"""The data plane tests on uvloop, which is used in production and closes and resets connections differently."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from tests.wire.bodies import test_large_payloads as large
from tests.wire.connections import test_resource_leaks as leaks
from tests.wire.faults import test_engine_and_client_failures as faults
from tests.wire.responses import test_local_replies as edge
from tests.wire.responses import test_relay as relay
from tests.wire.responses import test_writer as outlet

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
def test_each_data_plane_test_also_passes_on_uvloop(name: str) -> None:
    run(PLAIN[name])


@pytest.mark.parametrize(("script", "how"), LEAVING)
def test_client_disconnect_ends_engine_work_on_uvloop(script: int, how: str) -> None:
    run(lambda: faults.test_client_disconnect_ends_the_engine_request_and_frees_its_slot(faults.LEAVING[script], how))


@pytest.mark.parametrize("script", range(len(faults.BEFORE)))
def test_failure_before_the_first_byte_is_retried_on_uvloop(script: int) -> None:
    run(lambda: faults.test_failure_before_the_first_body_byte_is_retried_transparently(faults.BEFORE[script]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["leaves", "granted"])
def test_disconnect_while_a_slot_is_assigned_leaks_no_slot_on_uvloop(first: str, stream: bool) -> None:
    run(lambda: leaks.test_disconnect_while_a_slot_is_assigned_leaks_no_slot(first, stream))


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("first", ["closes", "call"])
def test_reused_connection_closed_by_engine_is_replaced_on_uvloop(first: str, how: str) -> None:
    run(lambda: leaks.test_reused_connection_closed_by_engine_is_replaced_without_retry(first, how))
