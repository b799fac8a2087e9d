"""Devices of other vendors, as data: resource names, memory sizes and sharing mechanisms.

Contains the table and the Slicers that read it: whole devices, requested by a resource name; cards shared by HAMi
(`autoscaler.slicing.hami`); and Ascend NPUs, which HAMi divides by one template if Settings name one. A resource that
counts shares of devices is closed if the device of a share is unknown. Sources: HAMi 2.10 (charts/hami, pkg/device),
AMD's node labeller, Intel's device plugins; for Intel GPUs the memory is that of the data sheets less 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoscaler.slicing.hami import SCHEDULER, Card, Hami, HamiNames, parse_cards
from autoscaler.slicing.slicer_protocol import NodeFacts, PodFields, Slicer, SliceShare
from autoscaler.spec.quantity import MIB, parse_count, parse_size
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, Slice, SliceId

UNKNOWN_BYTES = 1 << 30
_SURE_MIB_OF_GB = 10**9 * 95 // 100 // MIB


class Vendor(NamedTuple):
    """Devices that pods request by one resource."""

    kind: str
    resource: str
    """Number of devices."""
    product: str = ""
    """Product name if no label gives it."""
    memory_mib: int = 0
    """Memory of one device if no label gives it; 0 if it varies."""
    product_label: str = ""
    memory_label: str = ""
    """Its value is a quantity."""
    count_label: str = ""
    products: Mapping[str, int] = {}
    """Memory in MiB by product label."""
    register: str = ""
    """HAMi's node annotation, where HAMi shares these devices."""
    parts: bool = False
    """The resource counts shares; which of them are on one device is unknown."""


class Template(NamedTuple):
    """A size into which an Ascend NPU can be divided."""

    name: str
    memory_mib: int
    cores: int


class Npu(NamedTuple):
    """An Ascend NPU model, as HAMi defines it."""

    word: str
    memory_mib: int
    """Allocatable memory."""
    cores: int
    templates: tuple[Template, ...]

    @property
    def resource(self) -> str:
        """Resource of the NPU count; the memory and core resources start with this name."""
        return f"huawei.com/{self.word}"

    @property
    def register(self) -> str:
        """Node annotation."""
        return f"hami.io/node-register-{self.word}"

    @property
    def allocated(self) -> str:
        """Pod annotation."""
        return f"hami.io/{self.word}-devices-allocated"


_V5, _V10 = Template("vir05_1c_16g", 16384, 5), Template("vir10_3c_32g", 32768, 10)
NPUS = (
    Npu("Ascend910A", 32768, 30, (
        Template("vir02", 2184, 2), Template("vir04", 4369, 4), Template("vir08", 8738, 8),
        Template("vir16", 17476, 16),
    )),
    Npu("Ascend910B2", 65536, 24, (
        Template("vir03_1c_8g", 8192, 3), Template("vir06_1c_16g", 16384, 6), Template("vir12_3c_32g", 32768, 12),
    )),
    Npu("Ascend910B3", 65536, 20, (_V5, _V10)),
    Npu("Ascend910B4-1", 65536, 20, (_V5, _V10)),
    Npu("Ascend910B4", 32768, 20, (Template("vir05_1c_8g", 8192, 5), Template("vir10_3c_16g", 16384, 10))),
    Npu("Ascend910C", 65536, 20, (_V5, _V10)),
    Npu("Ascend310P", 21527, 8, (Template("vir01", 3072, 1), Template("vir02", 6144, 2), Template("vir04", 12288, 4))),
)  # fmt: skip
TEMPLATES = tuple(sorted({template.name for npu in NPUS for template in npu.templates}))
_INTEL = {
    name: gb * _SURE_MIB_OF_GB for name, gb in (("Max_1550", 128), ("Max_1100", 48), ("Flex_170", 16), ("Flex_140", 6))
}
HAMI = (
    HamiNames(
        "hami-amd", "amd.com/gpu", "amd.com/gpumem", "amd.com/gpucores", "amd.com/use-gpu-uuid",
        "hami.io/node-amd-register", "hami.io/amd-devices-allocated", all_cores_by_default=True,
    ),
    HamiNames(
        "hami-hygon", "hygon.com/dcunum", "hygon.com/dcumem", "hygon.com/dcucores", "hygon.com/use-gpuuuid",
        "hami.io/node-dcu-register", "hami.io/dcu-devices-allocated", all_cores_by_default=True,
    ),
)  # fmt: skip
"""Vendors whose cards HAMi requests with memory in MiB and selects by UUID."""
VENDORS = (
    Vendor(
        "amd", "amd.com/gpu", product_label="amd.com/gpu.product-name", memory_label="amd.com/gpu.vram",
        register=HAMI[0].register,
    ),
    *(
        Vendor(f"intel-{driver}", f"gpu.intel.com/{driver}", product_label="gpu.intel.com/product",
               count_label="gpu.intel.com/device.count", products=_INTEL)
        for driver in ("i915", "xe")
    ),
    Vendor("ascend910", "huawei.com/Ascend910", "Ascend910", product_label="node.kubernetes.io/npu.chip.name"),
    *(Vendor(one.word.lower(), one.resource, one.word, one.memory_mib, register=one.register) for one in NPUS),
    Vendor("metax", "metax-tech.com/gpu", "MetaX"),
    Vendor("enflame", "enflame.com/gcu", "Enflame-GCU"),
    Vendor("kunlun", "kunlunxin.com/xpu", "Kunlun-XPU", register="hami.io/node-register-xpu"),
    Vendor("neuron", "aws.amazon.com/neuron", "AWS-Neuron"),
    Vendor("vastai", "vastaitech.com/va", "Vastai"),
    Vendor("biren", "birentech.com/gpu", "Biren"),
    Vendor("metax-shared", "metax-tech.com/sgpu", "MetaX", parts=True),
    Vendor("enflame-shared", "enflame.com/drs-gcu", "Enflame-GCU", parts=True),
    Vendor("kunlun-shared", "kunlunxin.com/vxpu", "Kunlun-XPU", parts=True),
    Vendor("cambricon-shared", "cambricon.com/vmlu", "Cambricon-MLU", parts=True),
    Vendor("mthreads-shared", "mthreads.com/vgpu", "MThreads", parts=True),
    *(
        Vendor(f"iluvatar-{chip.lower()}", f"iluvatar.ai/{chip}-vgpu", f"Iluvatar-{chip}", parts=True)
        for chip in ("MR-V100", "MR-V50", "BI-V150", "BI-V100")
    ),
)  # fmt: skip
RESOURCES = frozenset({*(one.resource for one in VENDORS), *(one.resource for one in HAMI)})
"""Resources by which pods request devices; nodes with such devices often have a taint of that name."""


class WholeDevice(NamedTuple):
    """The Slicer of whole devices of one resource."""

    vendor: Vendor

    @property
    def kind(self) -> str:
        """The value of `Slice.kind`."""
        return self.vendor.kind

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return one slice per device; for shares, one closed slice in total. None if HAMi allocates the devices."""
        vendor, device = self.vendor, node.declared.device if node.declared is not None else None
        many = parse_count(node.allocatable.get(vendor.resource))
        if not many or vendor.register in node.annotations:
            return None
        there = parse_count(node.labels.get(vendor.count_label)) or (device.count if device is not None else many)
        closed = (
            "" if not vendor.parts else f"{vendor.resource} counts shares, and the device of each share is not known"
        )
        if vendor.count_label in node.labels and many > there:
            closed = f"{vendor.resource} is offered {many} times for {there} devices"
        label = node.labels.get(vendor.product_label, "")
        product = label or (device.model if device is not None else "") or vendor.product
        memory_bytes = parse_size(node.labels.get(vendor.memory_label)) or vendor.products.get(label, 0) * MIB
        memory_bytes = memory_bytes or (int(device.memory_bytes) if device is not None else vendor.memory_mib * MIB)
        return tuple(
            Slice(
                id=SliceId(f"{node.name}/{vendor.kind}-{at}"), device=DeviceId(f"{node.name}/{vendor.kind}-{at}"),
                node=node.name, memory_bytes=memory_bytes or UNKNOWN_BYTES, isolation=Isolation.HARDWARE, shared=False,
                product=product, closed=closed, kind=self.kind, handle=vendor.resource,
            )
            for at in range(1 if vendor.parts else min(many, there))
        )  # fmt: skip

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request one unit of the resource per slice."""
        del replica
        return PodFields(limits={self.vendor.resource: str(len(parts))})


class Ascend(NamedTuple):
    """The Slicer of one Ascend NPU model under HAMi: whole NPUs, or equal parts by the template in Settings."""

    npu: Npu

    @property
    def kind(self) -> str:
        """The value of `Slice.kind`."""
        return f"hami-{self.npu.word.lower()}"

    @property
    def _all(self) -> Template:
        return Template("", self.npu.memory_mib, self.npu.cores)

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return as many slices per NPU as parts fit; they are isolated in hardware."""
        said = node.annotations.get(self.npu.register)
        there = parse_cards(said) if said is not None else None
        if there is None:
            return None
        return tuple(slice_ for card in there for slice_ in self._slices(node, card))

    def _slices(self, node: NodeFacts, card: Card) -> list[Slice]:
        part, closed = self._part(node)
        many = min(card.memory_mib // part.memory_mib, self.npu.cores // part.cores, card.tasks_max)
        return [
            Slice(
                id=SliceId(f"{node.name}/{card.uuid}-{at}"), device=DeviceId(f"{node.name}/{card.uuid}"),
                node=node.name, memory_bytes=part.memory_mib * MIB, compute_percent=100 * part.cores // self.npu.cores,
                isolation=Isolation.HARDWARE, shared=False, product=self.npu.word, healthy=card.healthy,
                kind=self.kind, handle=card.uuid, closed=closed,
                device_bytes=self.npu.memory_mib * MIB if part.name else 0,
            )
            for at in range(many)
        ]  # fmt: skip

    def _part(self, node: NodeFacts) -> tuple[Template, str]:
        """Return the template of each slice, and why it is closed."""
        asked = (
            node.declared.slicing.template if node.declared is not None and node.declared.slicing is not None else ""
        )
        found = next((one for one in self.npu.templates if one.name == asked), None)
        if found is not None or not asked:
            return found or self._all, ""
        known = ", ".join(one.name for one in self.npu.templates)
        return self._all, f"Settings `nodes` set template {asked}, but an {self.npu.word} has {known}"

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request NPUs by UUID. A part is requested by its memory, on one NPU; raises ValueError for several parts."""
        first = parts[0].slice
        if first.device_bytes and len(parts) != 1:
            raise ValueError(f"{replica}: HAMi gives one part of an {self.npu.word}, or whole ones, not {len(parts)}")
        uuids = dict.fromkeys(part.slice.handle for part in parts)
        limits = {self.npu.resource: str(len(uuids)), f"{self.npu.resource}-memory": str(first.memory_bytes // MIB)}
        use = f"hami.io/use-{self.npu.word}-uuid"
        return PodFields(limits=limits, annotations={use: ",".join(uuids)}, scheduler=SCHEDULER)


def build_slicer_families() -> tuple[tuple[Slicer, ...], ...]:
    """Return the Slicers, grouped by vendor, HAMi's first."""
    slicers: list[tuple[str, Slicer]] = [
        *((words.resource, Hami(words)) for words in HAMI), *((npu.resource, Ascend(npu)) for npu in NPUS),
        *((vendor.resource, WholeDevice(vendor)) for vendor in VENDORS),
    ]  # fmt: skip
    found: dict[str, tuple[Slicer, ...]] = {}
    for resource, slicer in slicers:
        maker = resource.partition("/")[0]
        found[maker] = (*found.get(maker, ()), slicer)
    return tuple(found.values())
