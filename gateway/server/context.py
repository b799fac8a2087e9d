"""The part of a gateway that client connections and requests use: base class of `gateway.gateway.Gateway`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autoscaler.contract import TenantEntry
from gateway.dispatch.call import Call, Outcome
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.effects import Effect
from gateway.errors import CallError
from gateway.http.body_buffers import Body
from gateway.http.host_check import HostCheck
from gateway.http.request_head import Head
from gateway.limits import Limits
from gateway.memory.body_budget import TLS_BYTES, BodyBudget
from gateway.request.auth import Directory
from gateway.telemetry import Telemetry
from gateway.upstream.external_check_client import CheckClient
from gateway.upstream.pool import Upstreams

if TYPE_CHECKING:
    from gateway.server.connection import Connection
    from gateway.server.proxied_call import ProxiedCall


class GatewayContext:
    """The shared parts of one gateway, and the events that its connections and requests report to it.

    Only Gateway derives from it and overrides every method. It is a class because modules of `server` cannot import
    Gateway, which is in a layer above them.
    """

    def __init__(  # noqa: PLR0917  one caller, Gateway, passes its parts in this order
        self, clock: Callable[[], float], limits: Limits, room: BodyBudget, dispatch: Dispatcher, upstreams: Upstreams,
        telemetry: Telemetry,
    ) -> None:  # fmt: skip
        self.clock = clock
        self.limits = limits
        self.room = room
        self.body_bytes_max = max(0, min(limits.body_bytes_max, room.large_bytes - TLS_BYTES))
        self.directory = Directory()
        self.host_check: HostCheck | None = None
        """Applies to every request; None if the listener is not on loopback, or API keys are required."""
        self.dispatch = dispatch
        self.upstreams = upstreams
        self.telemetry = telemetry
        self.checks = CheckClient()
        self.closing = False
        self.paused: set[Connection] = set()
        """Connections whose clients do not keep up."""

    def make_id(self) -> str:
        """Create a request id."""
        raise NotImplementedError

    def tenant(self, head: Head) -> TenantEntry:
        """Return the tenant of a request. Raises CallError 401; 503 while the catalogue has not arrived."""
        raise NotImplementedError

    def connection(self) -> Connection:
        """Build a protocol (the factory of the inference port)."""
        raise NotImplementedError

    def opened(self, connection: Connection) -> bool:
        """Register a client connection; False if there are too many."""
        raise NotImplementedError

    def closed(self, connection: Connection) -> None:
        """Remove a client connection."""
        raise NotImplementedError

    def close_soon(self, connection: Connection) -> None:
        """Close a connection without a request whose client has disconnected."""
        raise NotImplementedError

    def count(self, address: str) -> bool:
        """Count one more connection of an address; False if the address or all clients together have too many."""
        raise NotImplementedError

    def discount(self, address: str) -> None:
        """Count one connection less of an address."""
        raise NotImplementedError

    def begin(self, proxied_call: ProxiedCall, now_s: float) -> None:
        """Register a new request."""
        raise NotImplementedError

    def checked(self, proxied_call: ProxiedCall, error: CallError | None) -> None:
        """Handle the result of an external check: the error for the client, or None."""
        raise NotImplementedError

    def end(self, proxied_call: ProxiedCall, outcome: Outcome, now_s: float) -> None:
        """Handle the outcome of a request."""
        raise NotImplementedError

    def fail_faulty(self, call: Call, error: Exception) -> None:
        """An exception concerns one request only: report it and end that request."""
        raise NotImplementedError

    def discard(self, body: Body | None) -> None:
        """Free a body that is no longer needed."""
        raise NotImplementedError

    def perform(self, effects: list[Effect]) -> None:
        """Perform dispatch effects in order."""
        raise NotImplementedError
