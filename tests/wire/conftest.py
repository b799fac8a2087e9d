"""Makes timeouts of the gateway that are shorter than a pause of this process longer for all tests of this folder.

Clients, gateway and engines share one process. After a pause, each of them seems to have been silent.
"""

from __future__ import annotations

import pytest

from gateway.server import proxied_call
from gateway.upstream import connection, pool

LONG_S = 60.0
"""Longer than a pause of a process on a busy machine."""


@pytest.fixture(autouse=True)
def _long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause, a connect must not fail, a reset must not count as a retry, and an upload must keep its engine.

    A test of one of these timeouts sets it itself.
    """
    for module, name in ((pool, "CONNECT_S_MAX"), (connection, "STALE_S"), (proxied_call, "GROWING_S_MAX")):
        monkeypatch.setattr(module, name, LONG_S)
