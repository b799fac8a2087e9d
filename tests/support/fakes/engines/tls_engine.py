"""A process that is an engine with TLS: ready at once, with scripted responses to every request.

`python -m tests.support.fakes.engines.tls_engine PORT CERT KEY`; for `engine: command` of a Model with `spec.tls`.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path

from tests.support.fakes.engines.scripted_engine import (
    DONE,
    END,
    OK,
    STREAM_HEAD,
    Script,
    ScriptedEngine,
    delta,
    document,
)

STREAM = STREAM_HEAD + b"".join(map(delta, "abc")) + DONE + END
"""Without usage: the gateway requests it only of engines that are known to support the option."""


class SecureEngine(ScriptedEngine):
    """Healthy, and streams on request."""

    def script(self, request: bytes) -> Script:
        """Returns the script for a request."""
        if request.startswith(b"GET "):
            return (document(b"{}"),)
        return (STREAM,) if b'"stream":true' in request.replace(b" ", b"") else (OK,)


def command(cert: Path, key: Path) -> list[str]:
    """The command of a Model."""
    return [sys.executable, "-m", "tests.support.fakes.engines.tls_engine", "{port}", str(cert), str(key)]


async def main(port: int, cert: str, key: str) -> None:
    """Serves until it is killed."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    async with SecureEngine((OK,), port=port, tls=context):
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
