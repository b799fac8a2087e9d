"""HAMi cards as slices: node and pod annotations, and how a pod requests its share of a card."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from autoscaler.documents.parse import parse_documents
from autoscaler.slicing import slicers
from autoscaler.slicing.hami import NVIDIA, SCHEDULER, Hami, HamiAllocation, HamiNames, parse_allocations, parse_cards
from autoscaler.slicing.hami import VOLCANO_NAMES as VOLCANO
from autoscaler.slicing.slicer_protocol import NodeFacts, SliceShare
from autoscaler.slicing.vendors import HAMI
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Slice
from tests.support.builders.slices import GIB, NODE, card, hami_node
from tests.support.builders.worlds import model, replica
from tests.support.golden import agrees, pod

MIB = 1 << 20
REGISTER, ALLOCATED = NVIDIA.register, NVIDIA.allocated
NOT_MORE = """
apiVersion: pilotlight.dev/v1alpha1
kind: Settings
nodes:
- {selector: {}, device: {model: A100, memory: 79Gi}, slicing: {kind: hami, overcommit: false}}
- {selector: {}, device: {model: A100, memory: 79Gi}, slicing: {kind: volcano, overcommit: false}}"""
RANKED = """
apiVersion: pilotlight.dev/v1alpha1
kind: Settings
priorityClasses:
- {least: 0, name: usual, hamiPriority: 1}
- {least: 50, name: more}
- {least: 100, name: urgent, hamiPriority: 0}"""


def slices(*cards: dict[str, object], **more: str) -> tuple[Slice, ...]:
    found = Hami().inventory(hami_node(*cards, labels=None, **more))
    assert found is not None
    return found


def test_each_hami_card_becomes_one_shared_slice_with_its_memory() -> None:
    one, other = slices(card(), card("GPU-bbbb", index=1, devmem=40960, health=False))
    assert (one.id, one.device, one.handle, one.kind) == ("node-1/GPU-aaaa", "node-1/GPU-aaaa", "GPU-aaaa", "hami")
    assert (one.memory_bytes, one.compute_percent, one.shared) == (80 * GIB, 100, True)
    assert (one.isolation, one.product, one.closed) == (Isolation.MEMORY, "NVIDIA-A100-SXM4-80GB", "")
    assert (one.healthy, other.healthy, other.memory_bytes) == (True, False, 40 * GIB)


def test_node_without_hami_is_ignored() -> None:
    assert Hami().inventory(NodeFacts(NODE, {"nvidia.com/gpu.product": "A100"})) is None


def test_old_and_new_hami_register_formats_give_the_same_card() -> None:
    """HAMi's docs/develop/protocol.md describes the older one; it had seven fields, later nine."""
    v100 = "NVIDIA-Tesla V100-PCIE-32GB"
    old = f"GPU-0055-a,10,32768,100,{v100},0,true:GPU-0fc3-b,10,32768,100,{v100},0,false,1,mig:"
    first, second = parse_cards(old) or ()
    assert (first.uuid, first.memory_mib, first.product) == ("GPU-0055-a", 32768, "NVIDIA-Tesla-V100-PCIE-32GB")
    assert (first.healthy, first.mode, second.healthy, second.mode) == (True, "hami-core", False, "mig")
    register = f'[{{"id":"GPU-0055-a","count":10,"devmem":32768,"devcore":100,"type":"{v100}","health":true}}]'
    assert parse_cards(register) == (first,)


def test_overcommitted_card_has_no_isolation() -> None:
    labels = {"nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    scaled = card(devmem=163840, devcore=200)
    (one,) = Hami().inventory(hami_node(scaled, labels=labels)) or ()
    assert (one.memory_bytes, one.compute_percent, one.isolation) == (160 * GIB, 200, Isolation.NONE)


@pytest.mark.parametrize(("label", "own_gib"), [("81920", 80), ("", 79)], ids=["by its label", "by the Settings"])
def test_disabled_overcommit_limits_a_card_to_its_own_size(label: str, own_gib: int) -> None:
    settings = parse_documents([("a.yaml", NOT_MORE)]).settings
    scaled = hami_node(card(devmem=163840, devcore=200), labels={"nvidia.com/gpu.memory": label} if label else {})
    (one,) = slicers.list_slices(scaled._replace(declared=settings.nodes[0]))
    assert (one.memory_bytes, one.compute_percent, one.isolation) == (own_gib * GIB, 100, Isolation.MEMORY)
    less = hami_node(card(devmem=40960, devcore=50))._replace(declared=settings.nodes[0])
    assert [(one.memory_bytes, one.compute_percent) for one in slicers.list_slices(less)] == [(40 * GIB, 50)]
    register = {VOLCANO.register: "GPU-a,10,163840,A100,true,hami-core:"}
    volcano = NodeFacts(NODE, {}, register, declared=settings.nodes[1])
    assert [(one.kind, one.memory_bytes) for one in slicers.list_slices(volcano)] == [("volcano", 79 * GIB)]


@pytest.mark.parametrize(
    ("register", "more", "why"),
    [
        (card(), {"device_cordon": "GPU-x,GPU-aaaa"}, "hami.io/device-cordon"),
        (card(), {"node_handshake": "Deleted_2026.01.01 00:00:00"}, "left its node"),
        (card(mode="mig"), {}, "partitions it by MIG"),
    ],
)
def test_card_that_hami_does_not_allocate_is_unavailable(
    register: dict[str, object], more: dict[str, str], why: str
) -> None:
    (one,) = slices(register, **more)
    assert why in one.closed


@pytest.mark.parametrize(
    "message",
    [
        "", "[", "[{}]", "[[]]", "[" * 100_000, "null", "[1]", ":", "a,b", "GPU-1,10,x,100,T4,0,true:",
        '[{"id":"GPU-1","count":10,"devmem":-5,"devcore":100}]', '[{"id":"GPU-1","count":10,"devmem":1e99}]',
        '[{"id":"GPU,1","count":10,"devmem":5,"devcore":100}]', '[{"id":"","count":1,"devmem":5,"devcore":1}]',
        '[{"id":"GPU-1","count":0,"devmem":5,"devcore":1}]', "GPU-1,10," + "9" * 5000 + ",100,T4,0,true:",
        '[{"id":"G","count":1,"devmem":5,"devcore":1},{"id":"G","count":1,"devmem":5,"devcore":1}]', "[\ud800]",
    ],
)  # fmt: skip
def test_unreadable_or_empty_card_annotation_yields_no_usable_slice(message: str) -> None:
    found = Hami().inventory(NodeFacts(NODE, {}, {REGISTER: message}))
    assert found == () if message in {"", ":"} else found is not None and REGISTER in found[0].closed


@pytest.mark.parametrize(("priority", "reported"), [(-1, None), (0, "1"), (50, None), (100, "0")])
def test_priority_class_sets_the_hami_task_priority_of_nvidia_pods_only(priority: int, reported: str | None) -> None:
    settings = parse_documents([("a.yaml", RANKED)]).settings
    one = slices(card())[0]
    ranked = settings.priority_class(priority)
    pod_fields = slicers.build_pod_fields(replica(model("a", 8), "r", [one.id]), {one.id: one}, ranked)
    assert pod_fields is not None
    assert pod_fields.limits.get("nvidia.com/priority") == reported
    (amd,) = Hami(HAMI[0]).inventory(NodeFacts(NODE, {}, {HAMI[0].register: json.dumps([card("AMD-1")])})) or ()
    pod_fields = slicers.build_pod_fields(replica(model("a", 8), "r", [amd.id]), {amd.id: amd}, ranked)
    assert pod_fields is not None
    assert not any("priority" in name for name in pod_fields.limits), "HAMi has none for these"


def test_pod_on_hami_cards_requests_their_number_memory_and_cores() -> None:
    one, other = slices(card(), card("GPU-bbbb"))
    fields = Hami(priority=1).fields("m-1", [SliceShare(one, 20 * GIB + 1, 30), SliceShare(other, 20 * GIB + 1, 30)])
    assert fields.limits == {
        "nvidia.com/gpu": "2", "nvidia.com/gpumem": "20481", "nvidia.com/gpucores": "29", "nvidia.com/priority": "1",
    }  # fmt: skip
    assert (fields.scheduler, fields.annotations["nvidia.com/use-gpuuuid"]) == (SCHEDULER, "GPU-aaaa,GPU-bbbb")
    alone = Hami().fields("m-1", [SliceShare(one, one.memory_bytes, 100)])
    beside = Hami().fields("m-2", [SliceShare(one, GIB, 100)])
    assert (alone.limits["nvidia.com/gpucores"], beside.limits["nvidia.com/gpucores"]) == ("100", "99")
    assert "nvidia.com/gpucores" not in Hami().fields("m-3", [SliceShare(one, GIB)]).limits
    agrees("slicing/hami", [pod("m-1", fields), pod("m-2", alone)])
    with pytest.raises(ValueError, match="m-4: HAMi gives a container the same amount of each card"):
        Hami().fields("m-4", [SliceShare(one, GIB), SliceShare(other, 2 * GIB)])


@given(st.integers(1, 81920 * MIB), st.integers(0, 100))
def test_memory_request_is_rounded_up_to_mib_within_the_card_memory(memory_bytes: int, cores: int) -> None:
    (one,) = slices(card())
    limits = Hami().fields("m", [SliceShare(one, memory_bytes, cores)]).limits
    assert memory_bytes <= int(limits["nvidia.com/gpumem"]) * MIB < memory_bytes + MIB
    assert int(limits["nvidia.com/gpumem"]) * MIB <= one.memory_bytes


def taken(words: HamiNames, requested: list[tuple[int, int]]) -> bool:
    """Whether HAMi's scheduler puts these pods on one card, one after the other (`Fit` of 2.10)."""
    total, used_mib, used_cores, tasks = 81920, 0, 0, 0
    one = Hami(words).inventory(NodeFacts(NODE, {}, {words.register: json.dumps([card()])})) or ()
    for mib, percent in requested:
        limits = Hami(words).fields("m", [SliceShare(one[0], mib * MIB, percent)]).limits
        asked_mib = int(limits[words.memory])
        asked = int(limits.get(words.cores, "100" if words.all_cores_by_default else "0"))
        if tasks >= 10 or asked_mib != mib or total - used_mib < asked_mib or 100 - used_cores < asked:
            return False
        if (asked == 100 and tasks) or (used_cores == 100 and asked == 0):
            return False
        used_mib, used_cores, tasks = used_mib + asked_mib, used_cores + asked, tasks + 1
    return True


@given(
    st.sampled_from([NVIDIA, *HAMI]),
    st.lists(st.tuples(st.integers(1, 8192) | st.just(81920), st.sampled_from([0, 1, 50, 100]) |
                       st.integers(0, 100)), max_size=10),
)  # fmt: skip
@example(NVIDIA, [(1, 50), (1, 50), (1, 0)])
@example(NVIDIA, [(1, 0), (1, 100), (1, 0)])
@example(HAMI[0], [(1, 0)] * 10)
def test_hami_scheduler_accepts_replicas_that_fit_a_slice(words: HamiNames, asks: list[tuple[int, int]]) -> None:
    """The packer counts memory and compute; requests are in whole MiB."""
    fitting: list[tuple[int, int]] = []
    for ask in asks:
        if sum(mib for mib, _ in [*fitting, ask]) <= 81920 and sum(percent for _, percent in [*fitting, ask]) <= 100:
            fitting.append(ask)
    assume(
        not words.all_cores_by_default or len({percent > 0 for _, percent in fitting}) < 2
    )  # see `all_cores_by_default`
    assert taken(words, fitting)


def test_hami_allocation_annotation_is_read_for_each_container_and_card() -> None:
    message = "GPU-aaaa,NVIDIA,3000,0:;;GPU-bbbb[1-0],NVIDIA,5000,30:GPU-cccc,NVIDIA,7,100:;"
    assert parse_allocations({ALLOCATED: message}) == (
        HamiAllocation(0, "GPU-aaaa", 3000 * MIB, 0),
        HamiAllocation(2, "GPU-bbbb", 5000 * MIB, 30),
        HamiAllocation(2, "GPU-cccc", 7 * MIB, 100),
    )
    assert parse_allocations({}) == ()


@given(st.text(max_size=200) | st.from_regex(r"([A-Z\-\[\]0-9]{0,6},?:?;?){0,20}"))
def test_malformed_hami_annotation_raises_no_error(said: str) -> None:
    for held in parse_allocations({ALLOCATED: said}):
        assert held.memory_bytes > 0
        assert held.cores >= 0
    for slice_ in Hami().inventory(NodeFacts(NODE, {}, {REGISTER: said, "hami.io/device-cordon": said})) or ():
        assert slice_.memory_bytes > 0
