"""Properties of scaling signals, in virtual time: the number of replicas follows the signal and returns with it."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.demand.scaling_signals import SCRAPE_S
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.spec.model import Model, Scaling
from autoscaler.state.events import SignalsSeen
from autoscaler.state.lifecycle import LIVE
from autoscaler.state.world import SignalTotal
from tests.support.builders.worlds import Scene, device, model, world
from tests.support.example_budget import examples

TARGET, MOST, IDLE_S = 10.0, 5, 10.0
STAY_S = 20 * IDLE_S + 4 * IDLE_S
"""An additional replica stays for 20 idle timeouts; peaks last for two."""
totals = st.integers(0, int(130 * TARGET * MOST)).map(lambda hundredths: hundredths / 100)
phases = st.lists(st.tuples(totals, st.booleans(), st.integers(1, 12)), max_size=5)


def count(scene: Scene, of: Model) -> int:
    """The replicas that serve or are about to."""
    return sum(scene.world.replicas[id].state in LIVE for id in scene.world.by_model.get(of.name, ()))


class Load:
    """One request always runs; the signal has the value that the test sets."""

    def __init__(self) -> None:
        self.model = model("a", slots=8, high=MOST, idle_seconds=IDLE_S, scaling=Scaling(tokens_per_second=TARGET))
        self.total, self.known = 0.0, True
        gpus = [device(f"gpu{number}", 15) for number in range(MOST)]
        """One for each replica: replicas on one device start one after another."""
        self.scene = Scene(world([self.model], gpus), self.demand)

    def demand(self, now_s: float, scene: Scene) -> Iterator[tuple[str, int, int]]:
        """Observe the signal and return the load."""
        seen = SignalTotal(total=self.total if self.known else 0.0, unknown="" if self.known else "of a timeout")
        batch = [SignalsSeen(model=self.model.name, signals={"tokensPerSecond": seen})]
        scene.world, _ = advance(scene.world, batch, now_s)
        yield ("a", 0, 1) if scene.ready("a") else ("a", 1, 0)

    def run(self, seconds: float) -> None:
        """Advance the time by whole scrapes."""
        self.scene.run(seconds, SCRAPE_S)

    def settle(self, total: float) -> int:
        """Return the number of replicas once the signal has had this value for long."""
        self.total, self.known = total, True
        self.run(STAY_S + 2 * SCRAPE_S)
        return count(self.scene, self.model)


@settings(deadline=None, max_examples=examples(100), derandomize=True)
@given(totals, phases)
def test_replica_count_returns_when_a_signal_returns_to_its_former_value(
    total: float, between: list[tuple[float, bool, int]]
) -> None:
    load = Load()
    before = load.settle(total)
    assert before == max(1, min(MOST, ceil(total / TARGET * (1 - 1e-6))))
    for value, known, scrapes in between:
        load.total, load.known = value, known
        for _ in range(scrapes):
            had = count(load.scene, load.model)
            load.run(SCRAPE_S)
            has = count(load.scene, load.model)
            if known:
                assert has >= min(MOST, ceil(value / TARGET * (1 - 1e-6))), "starts do not wait"
            else:
                assert has == had, "an unknown signal changes nothing"
    assert load.settle(total) == before
