"""Engine images on nodes: their names, node status, and where each image is present."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from autoscaler.agent_contract import NodeReport
from autoscaler.drivers.kubernetes.inventory import inventory
from autoscaler.drivers.kubernetes.inventory.inventory import Inventory
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.fold.agent_reports import FORGET_S
from autoscaler.fold.fold import fold
from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.constants import NODES
from autoscaler.spec.settings import Settings
from autoscaler.state.events import HostsSeen, ImagesSeen, NodeReported, SlicesSeen
from autoscaler.state.images import NodeImages, Whereabouts, make_image, normalize_image_name
from tests.support.builders.worlds import T0, world
from tests.unit.autoscaler.slicing.test_dra_partitions import Paths

GIB = 1 << 30
DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("written", "full"),
    [
        ("vllm/vllm-openai:v1", "docker.io/vllm/vllm-openai:v1"),
        ("ubuntu", "docker.io/library/ubuntu:latest"),
        ("index.docker.io/vllm/vllm-openai", "docker.io/vllm/vllm-openai:latest"),
        ("docker.io/library/ubuntu:24.04", "docker.io/library/ubuntu:24.04"),
        ("ghcr.io/ggml-org/llama.cpp:server-cuda", "ghcr.io/ggml-org/llama.cpp:server-cuda"),
        ("localhost/engine", "localhost/engine:latest"),
        ("registry:5000/engine", "registry:5000/engine:latest"),
        (f"vllm/vllm-openai:v1@{DIGEST}", f"docker.io/vllm/vllm-openai@{DIGEST}"),
        (f"ghcr.io/a/b@{DIGEST}", f"ghcr.io/a/b@{DIGEST}"),
    ],
)
def test_short_image_name_is_completed_to_its_full_name(written: str, full: str) -> None:
    assert normalize_image_name(written) == full
    assert normalize_image_name(full) == full


def test_node_images_are_read_with_sizes_up_to_a_maximum_count() -> None:
    names = ["docker.io/vllm/vllm-openai:v1", f"docker.io/vllm/vllm-openai@{DIGEST}"]
    status = {
        "images": [
            {"names": names, "sizeBytes": 9 * GIB},
            {"sizeBytes": 5},
            *[{"names": [f"x:{n}"]} for n in range(300)],
        ]
    }
    seen = nodes.read_node({"metadata": {"name": "n"}, "spec": {}, "status": status})
    assert seen.images[0] == make_image(tuple(names), 9 * GIB)
    assert seen.images[0] is make_image(tuple(names), 9 * GIB), "of many nodes it is one record"
    assert len(seen.images) == nodes.IMAGES_MAX


async def test_new_image_on_node_is_reported_without_rebuilding_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "HOSTS_EVERY_S", 0.0)
    node: dict[str, Any] = {
        "metadata": {"name": "n", "resourceVersion": "1"}, "spec": {}, "status": {"images": [{"names": ["e:1"]}]},
    }  # fmt: skip
    server, due, whole, heard = Paths({NODES: [node]}), asyncio.Event(), list[bool](), list[Any]()

    def look() -> None:
        heard.extend(one.look())
        due.set()

    one = Inventory(
        cast("Api", server), "n", Settings, is_ours=lambda _: False, held=list, changed=whole.append,
        hosts_changed=look,
    )  # fmt: skip
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(begun(one))
        while not whole:
            await asyncio.sleep(0)
        assert [type(reported) for reported in one.look()] == [SlicesSeen, HostsSeen, ImagesSeen]
        heard.clear()
        due.clear()
        later = {**node, "metadata": {"name": "n", "resourceVersion": "2"}, "status": {"images": [{"names": ["e:2"]}]}}
        server.truth, before = {"0": later}, len(whole)
        await one.refresh()
        await due.wait()
        assert [type(reported) for reported in heard] == [HostsSeen, ImagesSeen]
        assert heard[1].images == {"n": (make_image(("e:2",)),)}
        assert len(whole) == before
        watching.cancel()


async def begun(one: Inventory) -> None:
    async with asyncio.TaskGroup() as tasks:
        await one.begin(tasks)


def test_images_reported_by_kubelet_or_agent_expire_independently() -> None:
    one, big = world([], []), make_image(("e:1",), GIB)
    seen = ImagesSeen(images={"n0": (big,), "n1": (big,)})
    one, _ = fold(one, (seen,), T0)
    assert fold(one, (seen,), T0)[0] is one, "nothing new"
    one, _ = fold(one, (NodeReported(report=NodeReport(node="n0", boot="b", sequence=1, images=("e:2",))),), T0)
    assert one.nodes.images == {"n0": NodeImages((big,), (make_image(("e:2",)),)), "n1": NodeImages((big,))}
    one, _ = fold(one, (ImagesSeen(images={}),), T0)
    assert one.nodes.images == {"n0": NodeImages((), (make_image(("e:2",)),))}
    later, _ = fold(one, (), T0 + FORGET_S)
    assert later.nodes.images == {}, "its agent is long silent"
    one, _ = fold(one, (NodeReported(report=NodeReport(node="n0", boot="b", sequence=2)),), T0)
    assert one.nodes.images == {}


def test_image_index_after_random_changes_equals_a_search_of_all_nodes() -> None:
    rng, kept = Random(7), Whereabouts()
    images = [make_image((f"e:{n}", f"f:{n % 3}"), n * GIB) for n in range(6)]
    there: dict[str, NodeImages] = {}
    for _ in range(200):
        node = f"n{rng.randrange(5)}"
        drawn = [tuple(rng.sample(images, rng.randrange(4))) for _ in range(2)]
        there = {**there, node: NodeImages(*drawn)}
        if rng.random() < 0.2:
            there = {name: one for name, one in there.items() if name != node}
        kept.update(there)
        for name in ("e:1", "f:1", "docker.io/library/f:2", "g"):
            having = {
                n: one
                for n, has in there.items()
                for one in {*has.seen, *has.agent_images}
                if normalize_image_name(name) in one.names
            }
            assert kept.of(name) == having.keys()
            sizes = [
                one.size_bytes
                for has in there.values()
                for one in {*has.seen, *has.agent_images}
                if normalize_image_name(name) in one.names
            ]
            assert kept.size_bytes(name) == max(sizes, default=0)
    before = kept.version
    kept.update(dict(there))
    assert kept.version == before
