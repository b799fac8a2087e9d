"""An hour of virtual time with two installations in one cluster that both receive requests for the same Models.

Case K07. Processes are killed, started and paused at random, and the API server is unavailable for a minute. No
installation deletes a pod of the other, no Model is served twice, and at rest the status of a Model is written at most
once a minute.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import pytest

from autoscaler.drivers import probes
from autoscaler.kubernetes import leader_election
from autoscaler.spec.installation_ownership import installation_id
from pilotlight.processes.cluster import ClusterOptions
from tests.simulation.environment import process
from tests.simulation.environment.virtual_loop import run
from tests.simulation.installations.cluster import Skewed
from tests.simulation.installations.shared_cluster import Installed, SharedCluster, probe_of

HOUR_S, REST_S = 3600.0, 900.0
"""The last quarter of the hour is at rest: no requests arrive, and no process starts or ends."""
SETTLED_S = 300.0
"""Time after the last request: idle engines have ended, and statuses are up to date."""
CLUSTER, NAMESPACE = {"scope": "cluster"}, {"scope": "namespace"}
SCOPES = {
    "both of the cluster": (CLUSTER, CLUSTER), "one of the cluster": (CLUSTER, NAMESPACE),
    "second of the cluster": (NAMESPACE, CLUSTER), "none of the cluster": (NAMESPACE, NAMESPACE),
}  # fmt: skip
SECOND = {
    "two leases": {"namespace": "town", "lease": "two"}, "two homes": {"namespace": "town", "home": "other"},
    "two engines namespaces": {"namespace": "other"},
    "two leases and engines namespaces": {"namespace": "other", "lease": "two"},
}  # fmt: skip


async def disturb(dice: random.Random, installed: list[Installed], cluster: SharedCluster) -> None:
    """Requests for random Models at both; processes are killed, started, paused; outages of the API server."""
    one = dice.choice(installed)
    match dice.choice(["call", "call", "call", "kill", "pause", "away"]):
        case "call":
            for any_of in installed:
                any_of.called = {name for name in cluster.models if dice.random() < 0.5}
        case "kill":
            one.kill(dice.randrange(len(one.processes)))
            one.start()
        case "pause":
            paused = dice.choice(one.processes).process
            paused.stop()
            asyncio.get_running_loop().call_later(dice.uniform(1.0, 60.0), paused.go_on)
        case _:
            cluster.server.leave()
            asyncio.get_running_loop().call_later(dice.uniform(1.0, 60.0), cluster.server.come_back)


async def lived(scopes: str, second: str, seconds: float) -> tuple[SharedCluster, Counter[str]]:
    """The cluster, and the status writes at rest."""
    process.install()
    cluster, dice = SharedCluster({"ada": "town", "bob": "town", "cat": "other"}), random.Random(1)
    first_words, second_words = SCOPES[scopes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "probe_engine", probe_of(cluster))
        patch.setattr(leader_election, "datetime", Skewed)
        installed = [
            Installed(cluster, msgspec.convert(words, ClusterOptions))
            for words in ({"namespace": "town", **first_words}, {**SECOND[second], **second_words})
        ]
        now_s = asyncio.get_running_loop().time
        rests_s, ends_s = now_s() + seconds - REST_S, now_s() + seconds
        while now_s() < rests_s:
            await disturb(dice, installed, cluster)
            await asyncio.sleep(min(dice.uniform(10.0, 90.0), rests_s - now_s()))
        for one in installed:
            one.called = set()
        await asyncio.sleep(ends_s - now_s())
        for one in installed:
            await one.close()
    return cluster, cluster.status_writes(rests_s + SETTLED_S)


def holds(cluster: SharedCluster, written: Counter[str]) -> None:
    """No breach, all created objects are labelled, Models were served, and few statuses were written at rest."""
    assert cluster.breaches == []
    assert cluster.unlabelled() == set()
    assert cluster.made
    assert max(written.values(), default=0) <= (REST_S - SETTLED_S) / 60.0


@pytest.mark.standard
def test_two_cluster_scoped_installations_share_models_without_conflict() -> None:
    cluster, written = run(lived("both of the cluster", "two leases", HOUR_S / 2))
    holds(cluster, written)
    assert cluster.made.keys() == cluster.models.keys()
    for name, (message,) in cluster.elsewhere().items():
        assert {installation_id(*message.split()[1].split("/"))} == cluster.made[name], (
            "the condition names who serves it"
        )


@pytest.mark.deep
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("scopes", SCOPES)
def test_two_installations_of_any_scope_run_an_hour_without_conflict(scopes: str, second: str) -> None:
    holds(*run(lived(scopes, second, HOUR_S)))
