"""GPUs of a fabric by the composable resource operator: what becomes of its words, and how soon they are heard."""

from __future__ import annotations

import pytest

from autoscaler.capacity.base import RefusedError
from autoscaler.capacity.fabric_cro import NODES
from autoscaler.capacity.fabric_requests import API, RESOURCES, in_vain, read_resource, starved
from autoscaler.capacity.server import Object
from autoscaler.leases import OFFERS_MAX
from tests.contracts.provider import order
from tests.kit.cro_rack import MODEL, NODE, Rack, node
from tests.kit.fake_cro import NONE_FREE

MANAGER = "failed to process FM scaleup request. FM returned code: '{}', error message: '{}'"
"""As the operator passes on what the fabric's manager says."""


@pytest.fixture
def rack() -> Rack:
    """See Rack."""
    return Rack()


def waiting(error: str, on: str = "w77", **status: str) -> Object:
    """Somebody's resource that has no Device yet, and why not."""
    return {
        "apiVersion": API, "kind": "ComposableResource", "metadata": {"name": "gpu-of-another", "labels": {}},
        "spec": {"type": "gpu", "model": MODEL, "target_node": on},
        "status": {"state": "Attaching", "error": error, **status},
    }  # fmt: skip


def nodes(rack: Rack, names: list[str]) -> None:
    """These are there, too."""
    for name in names:
        rack.server.put(f"{NODES}/{name}", node(name))


def test_of_more_nodes_than_may_be_offered_those_with_the_most_room_are(rack: Rack) -> None:
    async def scenario() -> None:
        names = [f"w{at:03}" for at in range(OFFERS_MAX + 44)]
        nodes(rack, names)
        offers = await rack.provider().offers()
        assert len(offers) == OFFERS_MAX
        assert {one.devices_max for one in offers} == {4}, f"{NODE} has one already, and is the first by name only"
        assert [one.name for one in offers] == names[:OFFERS_MAX]
        assert await rack.provider().offers() == offers

    rack.run(scenario())


def test_what_is_wrong_on_one_node_closes_that_node_alone(rack: Rack) -> None:
    async def scenario() -> None:
        rack.cro.pool.clear()  # the operator does nothing about this model
        nodes(rack, ["w2", "w77"])
        offers = {one.node: one for one in await rack.provider().offers()}
        rack.server.put(f"{RESOURCES}/gpu-of-another", waiting("no nvidia driver found on node w77"))
        assert {one.node for one in await rack.provider().offers()} == {NODE, "w2"}
        with pytest.raises(RefusedError, match="something is wrong on node w77: gpu-of-another waits there in vain"):
            await rack.provider().acquire(order(offers["w77"]))
        await rack.provider().acquire(order(offers["w2"]))
        rack.server.change(f"{RESOURCES}/gpu-of-another", {"status": {"error": ""}})
        assert "w77" in {one.node for one in await rack.provider().offers()}

    rack.run(scenario())


@pytest.mark.parametrize(
    "error",
    [
        NONE_FREE,
        MANAGER.format("E021001", "No GPU is available."),
        MANAGER.format("E021002", "There are not enough free resources in the resource pool"),
        MANAGER.format("E021003", "insufficient resources"),
        "an error occurred with the resource in CM: 'all devices of the pool are exhausted'",
    ],
)
def test_who_is_told_that_the_fabric_has_none_closes_the_model(error: str) -> None:
    assert starved(in_vain([read_resource(waiting(error))], MODEL)) is not None
    assert starved(in_vain([read_resource(waiting(error))], "another model")) is None
    assert starved(in_vain([read_resource(waiting(error, device_id="GPU-1"))], MODEL)) is None, "it has one"


@pytest.mark.parametrize(
    "error",
    [
        "no nvidia driver found on node w77",
        "no Pod with label 'app.kubernetes.io/component=nvidia-driver' found on node w77",
        "no free slot is left in node w77",
        "failed to get annotation 'machine.openshift.io/machine' from Node w77, now is ''",
        "failed to process CM get request. http returned status: 404",
        MANAGER.format("E02XXXX", "scaleup method not found"),
        "the attached device called by gpu-1 is in Critical state",
    ],
)
def test_other_words_of_the_operator_are_no_word_about_the_whole_fabric(error: str) -> None:
    vain = in_vain([read_resource(waiting(error))], MODEL)
    assert [one.node for one in vain] == ["w77"]
    assert starved(vain) is None
