"""The scaling ladder in the output of explain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.explain.scale_up_options import Step, explain_ladder
from autoscaler.placement.model.types import EvictionLevel
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Gpu, Model
from autoscaler.state.capacity import LeaseRefused, LeasesSeen, OffersSeen, ProviderTroubled
from autoscaler.state.world import World
from tests.support.builders.capacity import A, acted, cloud, observe, offer, offered, releases, shown, surge
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replica, use, world

SMALL = offer("shed", "s1", node="s1", memory_bytes=8 * GI, expected_s=1.0)


def explained(of: World, now_s: float = T0) -> tuple[str, ...]:
    return explain_model(of, plan(of, now_s), Log(), A.name, now_s).sentences


def rungs(of: World, model: Model = A, now_s: float = T0) -> tuple[Step, ...]:
    """The offer steps of the ladder."""
    steps = explain_ladder(of, plan(of, now_s), model, EvictionLevel.BUSY, now_s)
    return tuple(one for one in steps if one.kind == "offer")


def test_explain_gives_the_reason_for_each_rejected_capacity_offer() -> None:
    steps = rungs(surge(cloud(), offer(), SMALL))
    assert [(one.provider, one.chosen) for one in steps] == [("rack", True), ("cloud", False), ("shed", False)]
    first, second, third = steps
    assert first.says.startswith("rack: 1 x A100 on w1, expected 30 s, in time with probability ")
    assert (first.expected_seconds, first.why_not) == (30.0, "")
    assert first.cost is not None
    assert second.cost is not None
    assert first.cost < second.cost
    assert second.why_not == "another offer is more reliable, or reliable enough and cheaper"
    assert (third.why_not, third.expected_seconds) == ("insufficient room on this offer", None)


def test_explain_describes_the_state_of_an_undelivered_order() -> None:
    after, _ = acted(surge(offer()))
    (message,) = [one for one in explained(after, T0 + 12) if one.startswith("Ordered")]
    assert message == "Ordered from rack 12 s ago: 1 x A100 on w1; not listed by the provider yet."
    seen = shown(after, T0 + 13, says="the fabric is slow")
    assert any("phase coming (the fabric is slow)." in one for one in explained(seen, T0 + 14))


def test_refused_offer_is_explained_with_its_remaining_backoff() -> None:
    after, _ = acted(surge(offer()))
    (id,) = after.capacity.leases
    refused = observe(after, LeaseRefused(id=id, reason="the pool is empty"), now_s=T0 + 1)
    (message,) = [one for one in explained(refused, T0 + 11) if one.startswith("Offer")]
    assert message == "Offer from rack: A100 on w1: the pool is empty; the next attempt is in 50 s."


def test_explain_shows_the_error_of_a_silent_provider() -> None:
    begin = observe(
        surge(offer()), ProviderTroubled(provider="rack", says="does not respond (TimeoutError)", listing=True)
    )
    assert "Provider rack does not respond (TimeoutError)." in explained(begin)
    (step,) = rungs(begin, now_s=T0 + 200)
    assert step.why_not == "its provider has not responded for a while"


def test_reason_of_a_provider_without_offers_is_shown_until_it_offers() -> None:
    closed = OffersSeen(provider="rack", offers=(), closed="NodePool g4 does not exist")
    begin = observe(surge(offer()), closed)
    assert "Provider rack offers nothing: NodePool g4 does not exist." in explained(begin)
    assert not rungs(begin), "what it offered before is not to be had"
    (missing,) = plan(begin, T0).unmet
    assert "rack offers nothing: NodePool g4 does not exist" in missing.reason
    listed = observe(begin, LeasesSeen(provider="rack", leases=(), began_s=T0 + 1), now_s=T0 + 1)
    assert "Provider rack offers nothing: NodePool g4 does not exist." in explained(listed), (
        "its lists are another matter"
    )
    again = observe(listed, OffersSeen(provider="rack", offers=(offer(),)), now_s=T0 + 2)
    assert not [one for one in explained(again, T0 + 2) if one.startswith("Provider")]


def test_explain_mentions_no_offers_without_providers() -> None:
    assert not [one for one in explained(surge()) if "Offer" in one or "Ordered" in one]
    assert not releases(plan(surge(), T0).actions)


def test_offer_with_fewer_gpus_than_the_model_requests_is_insufficient() -> None:
    several = replace(A, spec=replace(A.spec, gpu=Gpu(count=3)))
    assert [one.why_not for one in rungs(surge(offer()), several)] == ["insufficient room on this offer"]


def test_explain_chooses_no_other_offer_while_an_order_is_undelivered() -> None:
    after, _ = acted(surge(offer(), cloud()))
    first, second = rungs(after, now_s=T0 + 12)
    assert (first.says, first.chosen, first.under_way) == ("rack: 1 x A100 on w1, ordered 12 s ago", True, True)
    assert (first.expected_seconds, first.why_not) == (18.0, "")
    assert (second.provider, second.chosen, second.why_not) == (
        "cloud",
        False,
        "capacity was already ordered from rack",
    )
    told_ = explained(after, T0 + 12)
    assert "Offer from rack: 1 x A100 on w1, ordered 12 s ago: chosen, in progress." in told_
    assert not any(one.endswith(": chosen.") for one in told_)


def test_queued_order_without_an_estimate_does_not_block_other_offers() -> None:
    queue = offer("queue", "q", node="", expected_s=None, price_per_hour=0.1, devices_max=1)
    after, _ = acted(surge(queue))
    both = offered(after, cloud())
    (queued,) = [one for one in rungs(both) if one.provider == "queue"]
    (added,) = [one for one in rungs(both) if one.provider == "cloud"]
    assert (queued.under_way, queued.expected_seconds) == (True, None)
    assert (added.chosen, added.under_way) == (True, False), "a queue alone is not waited for"


def test_explain_shows_both_hedged_orders_as_under_way() -> None:
    unsure = offer(confidence=0.2)
    hedged = offered(surge(), unsure, cloud(confidence=0.5), hedges=("rack", "cloud"))
    after, _ = acted(hedged)
    assert len(after.capacity.leases) == 2
    assert {(one.provider, one.under_way) for one in rungs(after)} == {("rack", True), ("cloud", True)}


def test_explain_output_matches_the_sample_in_the_capacity_page() -> None:
    """The sample is in `docs/how-to/capacity.md`, section Verify."""
    ada, bob = model("ada", 40, slots=4), model("bob", 20)
    bob = replace(bob, spec=replace(bob.spec, priority=1))
    a100: dict[str, Any] = {"product": "A100", "memory_bytes": 40 * GI, "shared": False}
    nodes: dict[str, Any] = {"node": "", "devices_max": 1, "shared": False}
    offers = (
        offer(name="worker-1", node="worker-1", expected_s=90.0, price_per_hour=1.2, **a100),
        offer("p4d", expected_s=240.0, price_per_hour=4.1, **{**nodes, **a100}),
        offer("dws", expected_s=None, price_per_hour=5.0, product="H100", memory_bytes=80 * GI, **nodes),
        offer("g4", expected_s=240.0, price_per_hour=0.53, product="T4", **nodes),
    )
    calls = gateway(
        levels=[replace(level("ada", 2, wait_s=8.0), soonest_deadline_s=532.0), level("bob", 0, 1)],
        uses=[use("bob-1", 1)],
    )
    there = [device("gpu0", 40, "worker-2", product="A100")]
    serves = replica(bob, "bob-1", ready_s=T0 - 100)
    begin = world([ada, bob], there, [serves], [calls], leading_since_s=T0 - 500)
    of = offered(begin, *offers)
    sentences = explain_model(of, plan(of, T0), Log(), ada.name, T0).sentences
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "capacity.md").read_text()
    (sample,) = re.findall(r"\n```\n(1 replica is needed.*?)\n```\n", page, re.DOTALL)
    assert sample.replace("\n  ", " ").splitlines() == list(sentences), "the sample, whose long lines are wrapped"
