"""Capacity orders of two installations on one API server, with providers of the same name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from autoscaler.providers.cro import objects as cro
from autoscaler.providers.kubernetes_access import CONFLICT, AnswerError
from autoscaler.providers.provider import RefusedError
from autoscaler.spec.installation_ownership import INSTALLATION, Ownership, installation_id
from autoscaler.spec.pod import MANAGED_BY
from tests.contracts.provider import OWNER, Rig, one, order, release
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.providers.cro_rig import Rack
from tests.support.harness.providers.provisioning_request_rig import ProvisioningRig
from tests.unit.autoscaler.providers.cluster_autoscaler.test_provider import GroupRig
from tests.unit.autoscaler.providers.karpenter.test_provider import NodesRig
from tests.unit.autoscaler.providers.kueue.test_provider import KueueRig

BLUE, GREEN = Ownership(installation_id("blue", "pilotlight")), Ownership(installation_id("green", "pilotlight"))


def server_of(rig: Any) -> PlayedServer:
    """The API server of a rig."""
    (server,) = (one for one in vars(rig).values() if isinstance(one, PlayedServer))
    return server


def owners(server: PlayedServer) -> list[str]:
    """The installation in each object of an order: in its label, or in its annotation on a ComposabilityRequest."""
    found: list[str] = []
    for path, body in sorted(server.objects.items()):
        labels = body["metadata"].get("labels") or {}
        request = cro.read_request(body) if path.startswith(f"{cro.REQUESTS}/") else None
        if request is not None:
            found += [note.installation for note in request.notes.values()]
        elif labels.get(MANAGED_BY) == "pilotlight" and not path.startswith(
            "/api/v1/nodes/"
        ):  # a copy of its NodeClaim
            found.append(labels.get(INSTALLATION, ""))
    return found


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig, Rack])
def test_order_of_another_installation_is_not_listed_or_released(made: Callable[[], Rig]) -> None:
    rig = made()

    async def scenario() -> None:
        server = server_of(rig)
        server.owner = BLUE
        ordered = order((await rig.provider().offers())[0])
        await rig.provider().acquire(ordered)
        server.owner = GREEN
        await asyncio.sleep(60.0)
        assert await rig.provider().list() == ()
        await rig.provider().release(release(ordered))
        await asyncio.sleep(60.0)
        server.owner = BLUE
        assert (await one(rig.provider())).name == ordered.id.name

    rig.run(scenario())


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig, Rack])
def test_order_with_a_name_used_by_another_installation_is_rejected(made: Callable[[], Rig]) -> None:
    rig = made()

    async def scenario() -> None:
        server = server_of(rig)
        server.owner = BLUE
        ordered = order((await rig.provider().offers())[0])
        await rig.provider().acquire(ordered)
        server.owner = GREEN
        with pytest.raises(RefusedError):
            await rig.provider().acquire(ordered)

    rig.run(scenario())


# --- orders of an earlier version, which did not write the installation -----------------------------------------------


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig, Rack])
def test_first_installation_that_lists_an_unlabeled_order_labels_it_once(
    made: Callable[[], Rig],
) -> None:
    rig = made()

    async def scenario() -> None:
        server = server_of(rig)
        ordered = order((await rig.provider().offers())[0])
        await rig.provider().acquire(ordered)
        assert set(owners(server)) == {""}
        server.owner = GREEN
        for _ in range(2):  # a label is written by the next list if the object has changed meanwhile
            await asyncio.sleep(60.0)
            assert (await one(rig.provider())).name == ordered.id.name
        assert set(owners(server)) == {GREEN.installation}
        writes = [path for method, path, body in server.writes if GREEN.installation in str(body)]
        await rig.provider().list()
        assert [path for method, path, body in server.writes if GREEN.installation in str(body)] == writes
        server.owner = BLUE
        assert await rig.provider().list() == ()
        await rig.provider().release(release(ordered))
        server.owner = GREEN
        assert (await one(rig.provider())).phase != "leaving"

    rig.run(scenario())


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig, Rack])
def test_unlabeled_order_is_ignored_by_installations_not_serving_its_model(made: Callable[[], Rig]) -> None:
    rig = made()

    async def scenario() -> None:
        server = server_of(rig)
        ordered = order((await rig.provider().offers())[0])
        await rig.provider().acquire(ordered)
        server.owner, server.foreign = GREEN, {OWNER}
        await asyncio.sleep(60.0)
        assert await rig.provider().list() == ()
        await rig.provider().release(release(ordered))
        with pytest.raises(RefusedError):
            await rig.provider().acquire(ordered)
        assert set(owners(server)) == {""}, "it is neither labelled nor deleted"
        server.owner, server.foreign = BLUE, set()
        assert (await one(rig.provider())).name == ordered.id.name
        await rig.provider().list()
        assert set(owners(server)) == {BLUE.installation}

    rig.run(scenario())


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig, Rack])
def test_order_without_label_is_listed_while_its_label_cannot_be_written(made: Callable[[], Rig]) -> None:
    """A follower may not write; its next list as the leader writes the label."""
    rig = made()

    async def scenario() -> None:
        server = server_of(rig)
        ordered = order((await rig.provider().offers())[0])
        await rig.provider().acquire(ordered)
        server.owner = GREEN
        server.refused["PATCH"] = AnswerError(CONFLICT, "Conflict", "it has changed")
        assert (await one(rig.provider())).name == ordered.id.name
        assert set(owners(server)) == {""}
        del server.refused["PATCH"]
        await rig.provider().list()
        await rig.provider().list()
        assert set(owners(server)) == {GREEN.installation}

    rig.run(scenario())


@pytest.mark.parametrize("made", [GroupRig, NodesRig, ProvisioningRig, KueueRig])
def test_label_that_another_installation_wrote_meanwhile_is_kept(made: Callable[[], Rig]) -> None:
    """ComposabilityRequests: every change of their annotations has a condition on the version."""
    rig, labelled = made(), list[str]()

    async def scenario() -> None:
        server = server_of(rig)
        await rig.provider().acquire(order((await rig.provider().offers())[0]))
        server.owner = GREEN

        def label(method: str, path: str) -> None:
            assert method == "PATCH"
            labelled.append(path)
            server.change(path, {"metadata": {"labels": BLUE.labels}})

        server.before_write = label
        await rig.provider().list()
        assert [server.objects[path]["metadata"]["labels"][INSTALLATION] for path in labelled] == [BLUE.installation]

    rig.run(scenario())
