"""One gateway: the state shared by its parts, and the single place that performs dispatch effects.

Contains the directory, dispatch, upstreams, telemetry, the client connections and the running requests. There is no
global state: tests build as many gateways as they like. Effects are performed in order. One sweep serves all timeouts,
so a request costs no timer. `drain` rejects queued requests, lets running ones finish, and ends the rest after the
grace period with one clear error.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable

from autoscaler.contract import (
    LEADER_SILENT_S,
    CatalogueDelta,
    GatewayId,
    ModelName,
    Report,
    ReportAnswer,
    RoutesDelta,
    TenantEntry,
)
from gateway import errors
from gateway.control import fault_containment
from gateway.dispatch.call import Call, CallState, Outcome
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.effects import Effect, Grant, Refuse, ReportNow
from gateway.errors import CallError
from gateway.exception_handling import describe_error, reraise_memory_error
from gateway.http.body_buffers import Body, ChunkedBody
from gateway.http.host_check import HostCheck, is_on_loopback
from gateway.http.request_head import Head
from gateway.limits import Limits
from gateway.memory import process_memory
from gateway.memory.body_budget import BodyBudget
from gateway.memory.memory_sampler import MemoryGuard
from gateway.policy.external_check_addresses import AddressRules
from gateway.request.headers import get_call_headers
from gateway.server.connection import Connection
from gateway.server.context import GatewayContext
from gateway.server.proxied_call import ProxiedCall
from gateway.telemetry import Telemetry
from gateway.upstream.pool import Upstreams

SWEEP_S = 0.05
"""Sweep interval while requests are present: the maximum delay in noticing a deadline."""
IDLE_SWEEP_S = 0.5
"""Sweep interval without requests."""
GIVE_BACK_BYTES = 4 << 20
"""Bytes of bodies freed per event loop iteration: half a millisecond."""
CONNECTION_BYTES, CALL_BYTES = 32 << 10, 16 << 10
"""Accounted memory per client connection (over TLS, with buffers) and per request (with its engine connection)."""
PARKED_SHARE = 0.5
"""Additional share of the body budget for small bodies of queued requests."""
DESCRIPTORS_RESERVED = 8
"""File descriptors that client connections leave free: links to autoscalers that connect again, and saved snapshots."""
CALLS_SWEEP_S, CONNECTIONS_SWEEP_S, POOLS_SWEEP_S = 0.2, 0.5, 1.0
SWEPT_A_TURN, SWEEP_S_A_TURN = 256, 0.0002
"""Limits of a check of timeouts in one event loop iteration: connections, and seconds. 256 take 0.1 ms; a connection
that is rejected because its timeout has expired takes as long as a hundred others.
"""
CLOSED_A_TURN = 8
"""Connections without a request that are closed in one event loop iteration after their clients have disconnected:
about 0.2 ms. Without a limit, 5,000 clients that disconnected at once delayed other requests by up to 14 ms.
"""

_DEFAULT_LIMITS = Limits()


class Gateway(GatewayContext):
    """A gateway without its sockets. `boot` differs at every start; `clock` returns monotonic seconds.

    `engine_tls` is called for every new connection and returns the TLS context that verifies engines.
    """

    def __init__(
        self,
        gateway: GatewayId,
        boot: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        limits: Limits = _DEFAULT_LIMITS,
        engine_tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        events_fd: int | None = None,
        service_address: str = "",
    ) -> None:
        self._scale = MemoryGuard(limits.memory_bytes or process_memory.limit_bytes())
        room, dispatch = BodyBudget(self._scale.limit_bytes), Dispatcher(gateway, boot)
        super().__init__(clock, limits, room, dispatch, Upstreams(engine_tls), Telemetry(events_fd))
        dispatch.parked.bytes_max = int(room.size_bytes * PARKED_SHARE)
        self._on_loopback = False
        self._service_address = service_address
        """The address of a service of the cluster (`AddressRules`)."""
        self.checks.set_rules(AddressRules(service_address=service_address))
        self.checks.on_failure = self.telemetry.check_failed
        self.on_report: Callable[[], None] = _ignore_edge
        self.directory.all_policies.on_fault = _report_policy_fault
        self._ids = 0
        self._id_prefix = f"{gateway}-{boot}-"
        self._calls: dict[Call, ProxiedCall] = {}
        self._connections: set[Connection] = set()
        self._addresses: dict[str, int] = {}
        self._counted = 0
        self.own_descriptors = 0
        """File descriptors that this process has open without a client."""
        self._waste: list[ChunkedBody] = []
        self._disconnected: deque[Connection] = deque()
        """Connections to close, because their clients have disconnected."""
        self._unswept: list[Connection] = []
        """Connections whose timeouts are still to be checked in the current sweep."""
        self._swept_calls_s = self._swept_connections_s = self._swept_pools_s = 0.0
        self._heard_s: float | None = None
        self.informed = asyncio.Event()
        """Set once catalogue and Routes have arrived, so that requests can be judged."""
        self._awake = asyncio.Event()
        """Set while there is a request."""
        self._quiet = asyncio.Event()
        """While draining: set when a request or connection has ended."""

    # --- Follower, for sync ------------------------------------------------------------------------------------------

    def catalogue(self, delta: CatalogueDelta) -> None:
        """Apply a change of the catalogue."""
        faults = self.directory.apply(delta)
        if delta.settings is not None:
            settings = delta.settings
            self.checks.set_rules(AddressRules(settings.check_hosts, settings.service_networks, self._service_address))
        self._renew_host_check()
        self.perform(self.dispatch.catalogue(delta, self.clock(), faults))
        self._note_informed()

    def routes(self, delta: RoutesDelta) -> None:
        """Apply a change of Routes."""
        self._heard_s = self.clock()
        self.perform(self.dispatch.routes(delta, self._heard_s))
        self._note_informed()

    def _note_informed(self) -> None:
        if self.directory.known and self._heard_s is not None:
            self.informed.set()

    def restored(self, catalogue: CatalogueDelta, routes: RoutesDelta) -> None:
        """Apply the snapshot of an earlier process. The leader counts as silent until its first message."""
        self.catalogue(catalogue)
        self._heard_s = self.clock() - LEADER_SILENT_S
        self.perform(self.dispatch.routes(routes, self._heard_s))
        self._note_informed()

    def report(self) -> Report:
        """Return a report of the current demand and slot use."""
        return self.dispatch.report(self.clock())

    def answered(self, sequence: int, answer: ReportAnswer) -> None:
        """Handle an autoscaler's answer to the report of that sequence."""
        self.dispatch.answered(sequence, answer)

    def busy(self) -> bool:
        """Return whether anything waits, here or in another gateway."""
        return self.dispatch.busy()

    def has_faults(self) -> bool:
        """Return whether an exception closed a model, which the complete catalogue and Routes open again."""
        return self.dispatch.has_faults()

    # --- for the operations port -------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether it can serve: it has catalogue and Routes and is not stopping."""
        return self.informed.is_set() and not self.closing

    def metrics(self) -> bytes:
        """Return the metrics as Prometheus text."""
        age_s = None if self._heard_s is None else self.clock() - self._heard_s
        return self.telemetry.text(self.dispatch.counts(), age_s)

    # --- for connections and requests --------------------------------------------------------------------------------

    def listens_at(self, socket_address: object) -> None:
        """Set the listener's address (`getsockname`), before the first client connects."""
        self._on_loopback = is_on_loopback(socket_address)
        self._renew_host_check()

    def _renew_host_check(self) -> None:
        directory = self.directory
        settings = directory.settings
        applies = self._on_loopback and directory.known and not settings.keys_needed
        self.host_check = HostCheck(settings.hosts, settings.cors_origins) if applies else None

    def connection(self) -> Connection:
        """Build a protocol (the factory of the inference port)."""
        return Connection(self)

    def make_id(self) -> str:
        """Create a request id."""
        self._ids += 1
        return self._id_prefix + hex(self._ids)[2:]  # noqa: FURB116  compiled, a third of the time of a format

    def tenant(self, head: Head) -> TenantEntry:
        """Return the tenant of a request. Raises CallError 401; 503 while the catalogue has not arrived."""
        if not self.directory.known:
            raise errors.gateway_starting()
        return self.directory.authenticate(get_call_headers(head).keys_sha256, time.time())

    def begin(self, proxied_call: ProxiedCall, now_s: float) -> None:
        """Register a new request."""
        call = proxied_call.call
        self._calls[call] = proxied_call
        if len(self._calls) == 1:
            self._awake.set()
        if proxied_call.policy is None or not proxied_call.check_request():
            self.perform(self.dispatch.arrive(call, now_s))

    def checked(self, proxied_call: ProxiedCall, error: CallError | None) -> None:
        """Handle the result of an external check: the error for the client, or None."""
        try:
            proxied_call.checked(error)
        except Exception as fault:  # noqa: BLE001 - an exception concerns one request only
            self.fail_faulty(proxied_call.call, fault)

    def end(self, proxied_call: ProxiedCall, outcome: Outcome, now_s: float) -> None:
        """Handle the outcome of a request."""
        call = proxied_call.call
        if call in self._calls:
            del self._calls[call]
        if self.closing:
            self._quiet.set()
        effects = self.dispatch.finish(call, now_s, outcome)
        if effects:
            self.perform(effects)

    def opened(self, connection: Connection) -> bool:
        """Register a client connection; False if there are too many."""
        self._connections.add(connection)
        return self.count(connection.address)

    def closed(self, connection: Connection) -> None:
        """Remove a client connection."""
        self._connections.discard(connection)
        self.paused.discard(connection)
        self.discount(connection.address)
        if self.closing:
            self._quiet.set()

    def close_soon(self, connection: Connection) -> None:
        """Close a connection whose client has disconnected and has no request; a few in each loop iteration."""
        if not self._disconnected:
            asyncio.get_running_loop().call_soon(self._close_disconnected)
        self._disconnected.append(connection)

    def _close_disconnected(self) -> None:
        try:
            for _ in range(min(CLOSED_A_TURN, len(self._disconnected))):
                self._disconnected.popleft().hang_up()
        finally:  # an exception of one connection does not keep the others open
            if self._disconnected:
                asyncio.get_running_loop().call_soon(self._close_disconnected)

    def count(self, address: str) -> bool:
        """Count one more connection of an address; False if the address or all clients together have too many.

        Each running request needs a second descriptor, for its engine. If clients took all of them, no request could
        run.
        """
        number = self._addresses.get(address, 0) + 1
        self._addresses[address] = number
        self._counted += 1
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and 2 * self._counted + self.own_descriptors + DESCRIPTORS_RESERVED > limit:
            return False
        return number <= self.limits.connections_per_address_max

    def discount(self, address: str) -> None:
        """Count one connection less of an address."""
        self._counted -= 1
        number = self._addresses[address] - 1
        if number:
            self._addresses[address] = number
        else:
            del self._addresses[address]

    def discard(self, body: Body | None) -> None:
        """Free a body that is no longer needed; a large one over many loop iterations, because that takes long."""
        if isinstance(body, ChunkedBody):
            if not self._waste:
                asyncio.get_running_loop().call_soon(self._give_back)
            self._waste.append(body)

    def _give_back(self) -> None:
        size = 0
        while self._waste and size < GIVE_BACK_BYTES:
            body = self._waste[-1]
            if body.parts:
                size += len(body.parts.pop())
            else:
                self._waste.pop()
                self.room.release(body)
        if self._waste:
            asyncio.get_running_loop().call_soon(self._give_back)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Perform dispatch effects in order."""
        for effect in effects:
            try:
                if isinstance(effect, Grant):
                    self._calls[effect.call].granted(effect.address)
                elif isinstance(effect, Refuse):
                    self._calls[effect.call].refused(effect.error)
                elif isinstance(effect, ReportNow):
                    self.on_report()
                else:
                    fault_containment.report_fault(effect.model, "dispatch", describe_error(effect.error))
                    self._fail_waiting(effect.model)
            except Exception as error:
                if not isinstance(effect, (Grant, Refuse)):
                    raise
                self.fail_faulty(effect.call, error)

    def _fail_waiting(self, model: ModelName) -> None:
        """After an exception of dispatch emptied the queue of a model: end its requests that are still waiting."""
        for call, proxied_call in tuple(self._calls.items()):
            if call.model == model and proxied_call.waits and call.state is not CallState.ENDED:
                if call.state is CallState.PARKED:
                    call.state = CallState.ENDED
                self._end_faulty(call)

    def fail_faulty(self, call: Call, error: Exception) -> None:
        """An exception concerns one request only: report it and end that request."""
        reraise_memory_error(error)
        fault_containment.report_fault(call.model, "request", describe_error(error))
        self._end_faulty(call)

    def _end_faulty(self, call: Call) -> None:
        proxied_call = self._calls.get(call)
        if proxied_call is None:
            return
        try:
            proxied_call.fail(errors.model_faulty())
        except Exception as error:  # noqa: BLE001 - its client's connection ends by its own timeout
            reraise_memory_error(error)
            fault_containment.report_fault(call.model, "request", describe_error(error))
            self._calls.pop(call, None)

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Check all timeouts until canceled."""
        while True:
            self.sweep(self.clock())
            if self._calls:
                await asyncio.sleep(SWEEP_S)
                continue
            self._awake.clear()
            try:
                async with asyncio.timeout(IDLE_SWEEP_S):
                    await self._awake.wait()
            except TimeoutError:
                pass

    def sweep(self, now_s: float) -> None:
        """Check every timeout that may have expired."""
        due_s = self.dispatch.next_s()
        if due_s is not None and due_s <= now_s:
            self.perform(self.dispatch.tick(now_s))
        if now_s - self._swept_calls_s >= CALLS_SWEEP_S:
            self._swept_calls_s = now_s
            for call, proxied_call in tuple(self._calls.items()):
                try:
                    proxied_call.sweep(now_s)
                except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                    self.fail_faulty(call, error)
        if now_s - self._swept_connections_s >= CONNECTIONS_SWEEP_S:
            self._swept_connections_s = now_s
            self._weigh()
            if not self._unswept:  # else the last sweep continues
                self._unswept = [*self._connections]
                self._sweep_connections()
        if now_s - self._swept_pools_s >= POOLS_SWEEP_S:
            self._swept_pools_s = now_s
            self.upstreams.sweep()
        self.telemetry.flush()

    def _sweep_connections(self) -> None:
        """Check the timeouts of some connections, and of the others in the next loop iterations."""
        now_s = self.clock()
        try:
            for _ in range(min(SWEPT_A_TURN, len(self._unswept))):
                connection = self._unswept.pop()
                if connection not in self._connections:
                    continue
                try:
                    connection.sweep(now_s)
                except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                    reraise_memory_error(error)
                    fault_containment.report_fault(None, "client connection", describe_error(error))
                    connection.let_go()
                if self.clock() - now_s > SWEEP_S_A_TURN:
                    break
        finally:  # an exception of one connection does not end the sweep of the others
            if self._unswept:
                asyncio.get_running_loop().call_soon(self._sweep_connections)
            else:
                self.room.looked()

    def _weigh(self) -> None:
        """Update the memory pressure."""
        bodies = self.room.held_bytes + self.dispatch.parked.bytes + sum(one.backlog() for one in self.paused)
        bodies += self.checks.content_bytes + self.checks.held_bytes
        counted = 2 * (bodies + len(self._calls) * CALL_BYTES + len(self._connections) * CONNECTION_BYTES)
        self.dispatch.pressure = self._scale.weigh(self.clock(), counted, self.dispatch.pressure)

    async def drain(self, grace_s: float) -> None:
        """Reject queued requests; let running ones finish, or end them after `grace_s`. Close the listener first."""
        self.closing = True
        self.perform(self.dispatch.shutdown(self.clock()))
        for connection in tuple(self._connections):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(grace_s):
                while self._connections:
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            for proxied_call in tuple(self._calls.values()):
                proxied_call.fail(errors.shutting_down())
        for connection in tuple(self._connections):
            connection.let_go()
        await self.checks.close()
        self.upstreams.close()
        self.telemetry.flush()


def _report_policy_fault(model: ModelName, error: Exception) -> None:
    fault_containment.report_fault(model, "policy", describe_error(error))


def _ignore_edge() -> None:
    """Do nothing until sync sets its callback."""
