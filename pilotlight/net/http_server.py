"""The health port: whether a process lives and can serve, and its metrics, for kubelets and Prometheus. Nothing else.

Owns its opening. It asks for no key and may be open to others, unlike the operations port, which stays on loopback in a
pod (`kubectl port-forward` reaches it): metrics hold names of documents and numbers, and there is nothing to do here.
"""

from __future__ import annotations

from aiohttp import web

from pilotlight.net.listen import Address
from pilotlight.net.webserver import Runner
from pilotlight.process import socket_of


async def open_port(address: Address | None, application: web.Application) -> Runner:
    """Serves `application` (GET /healthz, /readyz, /metrics); `cleanup` ends it. Without an address nothing listens."""
    runner = Runner(application)
    await runner.setup()
    if address is not None:
        await web.SockSite(runner, socket_of(None, address)).start()
    return runner
