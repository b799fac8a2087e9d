"""Routes sent to gateways: states, estimates, rejections, and deltas that add up to the full routes."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import (
    GatewayId,
    Level,
    ModelName,
    ModelRoute,
    Refusal,
    ReplicaUse,
    Report,
    Route,
    RoutesDelta,
    TenantEntry,
    TenantName,
)
from autoscaler.fold.fold import Observation, fold
from autoscaler.queries.start_phases import last_phases_ms
from autoscaler.routing import catalogue, slots
from autoscaler.routing import routes as publish
from autoscaler.spec.model import Queue
from autoscaler.spec.tenant import Tenant, TenantSpec
from autoscaler.state.actions import Acted, Action, DrainReplica, FailReplica, StartReplica, StopReplica, Unmet
from autoscaler.state.events import DocumentsSeen, GatewayGone, GatewaySeen, ReplicaSeen, Reported, Seen, Synced, Tick
from autoscaler.state.lifecycle import IllegalIntentError
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, Replica, ReplicaResources, SliceId, World
from tests.support.builders.worlds import T0, gateway, level, model, replica, world
from tests.support.example_budget import examples

M, G1, G2 = ModelName("m"), GatewayId("g1"), GatewayId("g2")


def route_of(at: World, now_s: float = T0, unmet: dict[ModelName, Unmet] | None = None) -> ModelRoute:
    route = publish.model_route(at, M, now_s, G1, unmet or {})
    assert route is not None
    return route


def test_expected_wait_without_replicas_is_the_median_start_time() -> None:
    assert route_of(world([model("m")])) == ModelRoute(model=M)
    known = world([model("m")], histories={"m": History(starts_s=(2.0, 9.0, 4.0))})
    assert route_of(known).expected_wait_s == 4.0


def test_expected_wait_excludes_the_elapsed_part_of_a_start() -> None:
    starting = replica(model("m"), "r", state=S.STARTING, started_s=T0 - 3.0)
    at = world([model("m")], replicas=[starting], histories={"m": History(starts_s=(4.0,))})
    assert route_of(at) == ModelRoute(model=M, state="starting", expected_wait_s=1.0)
    assert route_of(at, T0 + 60.0).expected_wait_s == 0.0


def test_route_of_a_ready_model_contains_its_start_phases() -> None:
    ready = replica(
        model("m"), "r", wanted_s=T0 - 110.5, created_s=T0 - 110.0, started_s=T0 - 109.0, ready_s=T0 - 100.0
    )
    other = gateway("g2", [level("m", waiting=1)])
    route = route_of(world([model("m")], replicas=[ready], gateways=[gateway(), other]))
    assert (route.state, route.expected_wait_s, route.others_wait) == ("ready", 0.0, True)
    assert route.phases_ms == {"decide": 500.0, "place": 1000.0, "load": 9000.0}


def test_unobserved_start_phases_are_omitted() -> None:
    """A start without a request has no arrival time; an adopted engine was started by another process."""
    unasked = replica(model("m"), "r", created_s=T0 - 3.0, started_s=T0 - 2.0, ready_s=T0)
    adopted = replica(model("m"), "s", created_s=T0 - 1.0, started_s=T0 - 9.0, ready_s=T0)
    assert last_phases_ms([unasked, adopted]) == {"place": 1000.0, "load": 2000.0}
    assert last_phases_ms([adopted]) == {}


def test_requests_are_rejected_while_a_failed_start_backs_off() -> None:
    at = world([model("m")], histories={"m": History(refused_until_s=T0 + 60.0, failure="/secret/path is missing")})
    route = route_of(at)
    assert route.state == "failed"
    assert route.refusal is not None
    assert (route.refusal.code, route.refusal.retry_after_s) == ("model_start_failed", 60.0)
    assert route.refusal.message == "The model failed to start (see `pilotlight explain model m`)."
    at, _ = fold(at, [Tick()], T0 + 60.0)
    assert route_of(at, T0 + 60.0).refusal is None


def test_requests_are_accepted_during_a_backoff_if_a_replica_is_ready() -> None:
    at = world([model("m")], replicas=[replica(model("m"), "r")], histories={"m": History(refused_until_s=T0 + 60.0)})
    assert route_of(at).refusal is None


def test_requests_are_rejected_if_capacity_arrives_after_the_queue_limit() -> None:
    """Only without a replica: where one serves, they wait as usual. A shorter remaining time alone causes no update."""
    of = model("m", queue=Queue(wait_seconds_max=300.0))
    at = world([of])
    coming = {M: Unmet(model=M, reason="rack brings one", ready_s=610.0)}
    refusal = route_of(at, unmet=coming).refusal
    assert refusal == Refusal(
        code="no_capacity",
        message="capacity for the model is being added; expected in about 10 min 30 s; try again then",
        retry_after_s=publish.RETRY_S_MAX,
    )  # fmt: skip
    queued = route_of(at, unmet={M: Unmet(model=M, reason="asked", ready_s=inf)}).refusal
    assert queued is not None
    assert (
        queued.message == "More capacity for the model has been ordered; its delivery time is unknown. Try again later."
    )
    assert route_of(at, unmet={M: Unmet(model=M, reason="rack brings one", ready_s=300.0)}).refusal is None
    assert route_of(world([of], replicas=[replica(of, "r")]), unmet=coming).refusal is None
    nearer = {M: Unmet(model=M, reason="rack brings one", ready_s=605.0)}
    assert publish.routes_delta(at, at, G1, T0, nearer, unmet_before=coming) is None
    soon = {M: Unmet(model=M, reason="rack brings one", ready_s=290.0)}
    ends = publish.routes_delta(at, at, G1, T0, soon, unmet_before=nearer)
    assert ends is not None
    assert [route.refusal for route in ends.models] == [None]


def test_capacity_wait_is_rounded_down_to_a_multiple_of_30_seconds() -> None:
    """Requests with a shorter limit are rejected there; unknown times and Models that serve have no capacity wait."""
    of = model("m")
    coming = {M: Unmet(model=M, reason="rack brings one", ready_s=599.0)}
    assert route_of(world([of]), unmet=coming).capacity_wait_s == 570.0
    nearer = {M: Unmet(model=M, reason="rack brings one", ready_s=571.0)}
    at = world([of])
    assert publish.routes_delta(at, at, G1, T0, nearer, unmet_before=coming) is None
    for ready_s in (None, inf, 29.0):
        unmet = {M: Unmet(model=M, reason="", ready_s=ready_s)}
        assert route_of(at, unmet=unmet).capacity_wait_s is None
    assert route_of(world([of], replicas=[replica(of, "r")]), unmet=coming).capacity_wait_s is None


def test_routes_reject_a_model_only_while_it_fits_no_device() -> None:
    at = world([model("m")])
    never = {M: Unmet(model=M, reason="needs 99Gi", never=True)}
    refusal = route_of(at, unmet=never).refusal
    assert refusal is not None
    assert refusal.code == "no_capacity"
    assert route_of(at, unmet={M: Unmet(model=M, reason="full")}).refusal is None
    begins = publish.routes_delta(at, at, G1, T0, never, unmet_before={})
    ends = publish.routes_delta(at, at, G1, T0, {}, unmet_before=never)
    assert begins is not None
    assert [route.refusal for route in begins.models] == [refusal]
    assert ends is not None
    assert [route.refusal for route in ends.models] == [None]


def test_leader_sends_empty_routes_until_synced() -> None:
    """Otherwise its gateways would drop replicas that exist."""
    at = World(epoch=2)
    assert publish.routes_full(at, G1, T0) == RoutesDelta(epoch=2, version=0)
    synced, _ = fold(at, [Synced()], T0)
    delta = publish.routes_delta(at, synced, G1, T0)
    assert delta is not None
    assert delta.full


def test_gateway_report_without_changes_produces_no_route_delta() -> None:
    at = world([model("m")], replicas=[replica(model("m"), "r")])
    after, _ = fold(at, [Reported(report=Report(gateway=G1, boot="b", sequence=2, epoch=1, version=1))], T0 + 1.0)
    assert after is not at
    assert publish.routes_delta(at, after, G1, T0 + 1.0) is None
    assert catalogue.catalogue_delta(at, after) is None


def test_gateway_that_reduced_its_own_slots_gets_no_route_delta() -> None:
    """The gateway's own change is not echoed: a late echo must not raise a value that it has lowered further."""
    at = world([model("m")], replicas=[replica(model("m"), "r")], undivided=frozenset({M}), handed_over=True)
    moved = slots.divide_slots(at, T0)
    assert moved is not None
    at, _ = fold(at, [moved], T0)
    kept = ReplicaUse(replica=moved.holds[0][1], hold=1)
    lowered = Report(gateway=G1, boot="b", sequence=3, epoch=1, version=at.version, replicas=(kept,))
    after, _ = fold(at, [Reported(report=lowered)], T0)
    assert slots.read_latest_hold(after.gateways[G1], kept.replica) == 1
    assert publish.routes_delta(at, after, G1, T0) is None


def test_drain_is_sent_to_every_gateway_with_its_version() -> None:
    at = world([model("m")], replicas=[replica(model("m"), "r")], gateways=[gateway("g1"), gateway("g2")])
    after, _ = fold(at, [Acted(action=DrainReplica(replica=replica(model("m"), "r").id, reason="idle"))], T0)
    drain = next(iter(after.replicas.values())).drain
    assert drain is not None
    for reader in (G1, G2):
        delta = publish.routes_delta(at, after, reader, T0)
        assert delta is not None
        assert [route.state for route in delta.replicas] == ["draining"]
        assert (delta.epoch, delta.version) >= (drain.epoch, drain.version)


def test_catalogue_delta_lists_added_changed_and_removed_entries() -> None:
    a, b = model("a"), model("b")
    tenant = Tenant(name=TenantName("acme"), spec=TenantSpec(weight=2.0))
    at, _ = fold(World(epoch=1), [DocumentsSeen(models=(a, b))], T0)
    after, _ = fold(at, [DocumentsSeen(models=(model("a", slots=8), model("c")), tenants=(tenant,))], T0)
    delta = catalogue.catalogue_delta(at, after)
    assert delta is not None
    assert {entry.name for entry in delta.models} == {"a", "c"}
    assert delta.models_gone == ("b",)
    assert delta.tenants == (TenantEntry(name=TenantName("acme"), weight=2.0),)
    assert delta.settings is not None
    assert delta.settings.keys_needed
    assert catalogue.catalogue_full(after).full


# --- deltas add up ----------------------------------------------------------------------------------------------------


class Reader:
    """A gateway's copy of the routes, updated from messages according to the contract."""

    def __init__(self) -> None:
        self.replicas: dict[str, Route] = {}
        self.models: dict[str, ModelRoute] = {}

    def take(self, delta: RoutesDelta) -> None:
        if delta.full:
            self.replicas, self.models = {}, {}
        self.replicas.update({route.replica: route for route in delta.replicas})
        self.models.update({route.model: route for route in delta.models})
        for removed in delta.replicas_gone:
            self.replicas.pop(removed, None)
        for gone_model in delta.models_gone:
            self.models.pop(gone_model, None)

    def shown(self) -> tuple[object, ...]:
        """Holds count only if granted: an echo is the gateway's own. Estimates are omitted; they depend on the time."""
        routes = {
            id: (r.state, r.address, r.slots, r.granted, r.hold if r.granted else 0) for id, r in self.replicas.items()
        }
        return routes, {m: (r.state, r.others_wait, r.refusal and r.refusal.code) for m, r in self.models.items()}


REPLICAS = ("r1", "r2", "r3")


def seen(name: str, state: Seen, address: str) -> ReplicaSeen:
    return ReplicaSeen(
        id=replica(model("a"), name).id, model=ModelName("a" if name < "r3" else "b"), spec_hash="h", intent=name,
        slices=(SliceId("s"),), memory_bytes=1, slots=4, seen=state, address=address,
    )  # fmt: skip


def start(name: str) -> StartReplica:
    fresh = Replica(
        id=replica(model("a"), name).id,
        model=ModelName("a"),
        spec_hash="h",
        intent=name,
        resources=ReplicaResources(slices=(), memory_bytes=1),
    )
    return StartReplica(replica=fresh, reason="wanted")


reports = st.builds(
    lambda name, sequence, epoch, version, waiting, tenant: Reported(
        report=Report(
            gateway=GatewayId(name), boot="b", sequence=sequence, epoch=epoch, version=version,
            levels=(Level(model=ModelName("a"), tenant=TenantName(tenant), waiting=waiting),),
        )
    ),
    st.sampled_from(["g1", "g2"]),
    st.integers(1, 50),
    st.sampled_from([0, 1, 1, 1]),
    st.integers(0, 30),
    st.integers(0, 3),
    st.sampled_from(["x", "y"]),
)  # fmt: skip
ids = st.sampled_from([replica(model("a"), name).id for name in REPLICAS])
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(start, st.sampled_from(REPLICAS)),
    st.builds(lambda known: DrainReplica(replica=known, reason="x"), ids),
    st.builds(lambda known: StopReplica(replica=known, grace_s=1.0, reason="x"), ids),
    st.builds(lambda known: FailReplica(replica=known, reason="x"), ids),
)
observations: st.SearchStrategy[Observation] = st.one_of(
    st.builds(seen, st.sampled_from(REPLICAS), st.sampled_from(Seen), st.sampled_from(["h:1", "h:2"])),
    reports,
    st.builds(lambda action: Acted(action=action), actions),
    st.sampled_from([GatewaySeen(gateway=G1), GatewayGone(gateway=G2), Synced(), Tick()]),
    st.sampled_from([DocumentsSeen(models=(model("a"), model("b"))), DocumentsSeen(models=(model("b"),))]),
)


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(st.lists(st.tuples(st.lists(observations, max_size=4), st.booleans()), max_size=12))
def test_route_deltas_applied_in_order_equal_the_full_routes(steps: list[tuple[list[Observation], bool]]) -> None:
    """It holds for any observations, and for any number of steps that a slow reader skips."""
    at = World(epoch=1)
    reader, sent, now_s = Reader(), at, T0
    reader.take(publish.routes_full(at, G1, now_s))
    for batch, reads in steps:
        now_s += 7.0
        for observation in batch:
            try:
                at, _ = fold(at, [observation], now_s)
            except IllegalIntentError:
                continue
        moved = slots.divide_slots(at, now_s)
        if moved is not None:
            at, _ = fold(at, [moved], now_s)
        if reads:
            delta = publish.routes_delta(sent, at, G1, now_s)
            sent = at
            if delta is not None:
                reader.take(delta)
    last = publish.routes_delta(sent, at, G1, now_s)
    if last is not None:
        reader.take(last)
    whole = Reader()
    whole.take(publish.routes_full(at, G1, now_s))
    kept = {id for id, r in whole.replicas.items() if not r.granted}
    for id in kept & reader.replicas.keys():  # the leader, but not the gateway, forgets a grant acknowledged as 0
        if reader.replicas[id].granted:
            assert whole.replicas[id].hold == 0
            whole.replicas[id] = reader.replicas[id]
    if at.leadership.synced:
        assert reader.shown() == whole.shown()
