"""Signals reach the task that waits for them, whichever thread receives them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.standard

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


def test_signal_delivered_to_a_library_thread_is_received() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == ["17", "15", "True", "False", "None"]
