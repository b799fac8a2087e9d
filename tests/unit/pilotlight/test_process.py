"""A process reports errors that a user can fix, wherever they were raised, and receives signals in any thread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import click
import pytest

from pilotlight import process

PROGRAM = """
import signal, threading
from pilotlight.process import Signals

numbers = {signal.SIGTERM, signal.SIGCHLD}
signals = Signals(numbers)
over = threading.Event()
foreign = threading.Thread(target=over.wait)  # as a library's: it blocks nothing
foreign.start()
for number in (signal.SIGCHLD, signal.SIGTERM):
    signal.pthread_kill(foreign.ident, number)
    print(signals.wait(60))
with signals.held():
    print(numbers <= signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(bool(numbers & signal.pthread_sigmask(signal.SIG_BLOCK, ())))
print(signals.wait(0))
over.set()
"""


async def within_groups(error: Exception) -> None:
    """Raises the error like a gateway that opens its listening socket while tasks run."""
    async with asyncio.TaskGroup() as outer:
        outer.create_task(asyncio.sleep(60))
        async with asyncio.TaskGroup() as inner:
            inner.create_task(asyncio.sleep(60))
            raise error


def test_click_error_in_nested_task_groups_is_raised_unwrapped() -> None:
    with pytest.raises(click.ClickException, match="is taken"):
        process.run(within_groups(click.ClickException("127.0.0.1:80 is taken")))


def test_internal_error_in_a_task_group_is_raised_with_its_group() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        process.run(within_groups(ValueError("ours")))
    assert caught.value.subgroup(ValueError) is not None


@pytest.mark.standard
def test_signal_delivered_to_a_library_thread_is_received() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == ["17", "15", "True", "False", "None"]
