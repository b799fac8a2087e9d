"""Pod overrides: the fields that may be set, and those reserved for the planner."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.documents import document_rules
from autoscaler.documents.document_types import DocumentError, Documents
from autoscaler.documents.parse import parse_documents
from autoscaler.documents.render import to_yaml
from autoscaler.engines import EngineError
from autoscaler.slicing.slicer_protocol import SliceShare
from autoscaler.slicing.slicers import (
    AMOUNTS_BEGIN,
    CHOICES_BEGIN,
    NETWORK_BEGIN,
    is_device_annotation,
    is_device_resource,
)
from autoscaler.spec.model import Model
from autoscaler.spec.pod import Pod, SecretName, Toleration
from pilotlight.models.document_loading import build_launcher
from tests.support.builders.slices import EXAMPLES

FULL = """
pod:
  nodeSelector: {disk: fast}
  tolerations: [{key: team, operator: Equal, value: ml, effect: NoSchedule}]
  affinity: {podAntiAffinity: {}}
  annotations: {example.com/note: "any text"}
  labels: {team: ml}
  volumes: [{name: cache, emptyDir: {sizeLimit: 1Gi}}]
  volumeMounts: [{name: cache, mountPath: /cache}]
  imagePullSecrets: [{name: second}]
  serviceAccountName: engines
  runtimeClassName: nvidia
  schedulerName: other
  priorityClassName: high
  resources: {limits: {rdma/hca: 1}}
  securityContext: {runAsUser: 0}
"""


def document(text: str, kind: str = "Model") -> str:
    if kind == "Settings":
        return "apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\n" + text
    spec = "\n".join("  " + line for line in text.splitlines())
    head = "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: a}\nspec:\n  engine: ollama\n"
    return head + spec


def one(text: str) -> Model:
    return parse_documents([("a.yaml", document(text))]).models[0]


def test_pod_settings_survive_a_yaml_round_trip() -> None:
    found = parse_documents([("a.yaml", document(FULL)), ("s.yaml", document(FULL, "Settings"))])
    pod = found.models[0].spec.pod
    assert pod == found.settings.pod
    assert pod.tolerations == (Toleration(key="team", operator="Equal", value="ml", effect="NoSchedule"),)
    assert pod.image_pull_secrets == (SecretName(name="second"),)
    assert pod.resources.limits == {"rdma/hca": 1}
    again = parse_documents([("b.yaml", to_yaml(Documents(models=found.models, settings=found.settings)))])
    assert (again.models, again.settings) == (found.models, found.settings)


@pytest.mark.parametrize(
    ("pod", "line"),
    [
        (
            "affinity: {nodeAffinity: {}}",
            (
                "affinity.nodeAffinity: is set by Pilotlight, which chooses the node: "
                "select devices with spec.gpu.models or nodes with nodeSelector"
            ),
        ),
        ("affinity: {nodeAfinity: {}}", "affinity.nodeAfinity: unknown key; expected podAffinity or podAntiAffinity"),
        ("labels: {pilotlight.dev/model: x}", "labels.pilotlight.dev/model: is set by Pilotlight: remove it"),
        (
            "labels: {app.kubernetes.io/managed-by: x}",
            "labels.app.kubernetes.io/managed-by: is set by Pilotlight: remove it",
        ),
        ("annotations: {pilotlight.dev/drain: '1'}",
         "annotations.pilotlight.dev/drain: is set by Pilotlight: remove it"),
        *((f"{where}: {{{name}: x}}", f"{where}.{name}: is set by Pilotlight: remove it")
          for where in ("labels", "annotations") for name in (
              "autoscaling.x-k8s.io/consume-provisioning-request", "autoscaling.x-k8s.io/provisioning-class-name",
              "cluster-autoscaler.kubernetes.io/consume-provisioning-request",
              "cluster-autoscaler.kubernetes.io/provisioning-class-name",
              "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count")),
        ("labels: {a: 'no spaces'}", "labels.a: expected a Kubernetes label: at most 63 of A-Za-z0-9._-"),
        ("nodeSelector: {'-a': b}", "nodeSelector.-a: expected a Kubernetes label: at most 63 of A-Za-z0-9._-"),
        ("resources: {requests: {nvidia.com/gpu: 1}}",
         "resources.requests.nvidia.com/gpu: is set by Pilotlight: use spec.gpu.count"),
        ("volumes: [{emptyDir: {}}]", "volumes[0].name: missing; expected text"),
        ("volumes: [{name: pilotlight-weights, emptyDir: {}}]",
         "volumes[0].name: names that begin with pilotlight- are reserved: rename it"),
        ("volumes: [{name: a, emptyDir: {}}, {name: pilotlight-weights-1, emptyDir: {}}]",
         "volumes[1].name: names that begin with pilotlight- are reserved: rename it"),
        ("labels: {app.kubernetes.io/component: gateway}",
         "labels.app.kubernetes.io/component: selects Pilotlight's own pods: use another label"),
        ("volumeMounts: [{name: x, mountPath: /x}]",
         "volumeMounts[0].name: expected the name of a volume in `volumes`"),
        ("schedulerName: A_B", "schedulerName: expected a Kubernetes object name: lower-case letters, digits, - and ."),
        ("tolerations: [{operator: Is}]", "tolerations[0].operator: expected one of Equal, Exists"),
        ("containers: []", "containers: unknown key"),
        ("nodeName: n1", "nodeName: unknown key"),
    ],
)  # fmt: skip
def test_reserved_or_invalid_pod_fields_are_rejected_with_their_path(pod: str, line: str) -> None:
    for prefix, text in (("Model a: spec.pod.", document(f"pod: {{{pod}}}")),
                         ("Settings: pod.", document(f"pod: {{{pod}}}", "Settings"))):  # fmt: skip
        with pytest.raises(DocumentError) as error:
            parse_documents([("a.yaml", text)])
        found = str(error.value)
        assert found.startswith(f"a.yaml: {prefix}")
        assert found.removeprefix(f"a.yaml: {prefix}") == line


AMOUNTS = (
    "nvidia.com/gpu.shared", "nvidia.com/gpumem", "nvidia.com/gpucores", "nvidia.com/priority",
    "nvidia.com/mig-1g.10gb", "amd.com/gpu", "amd.com/gpumem", "volcano.sh/vgpu-memory",
    "huawei.com/Ascend910B4-memory", "gpu.intel.com/xe", "hygon.com/dcunum", "aws.amazon.com/neuron",
    "deviceclass.resource.kubernetes.io/gpu.nvidia.com",
    "nvidia.com/gpumem-percentage", "nvidia.com/a100", "amd.com/gpumem-percentage", "amd.com/cpx_nps4",
    "volcano.sh/vgpu-memory-percentage", "volcano.sh/gpu-memory", "metax-tech.com/vcore", "metax-tech.com/vmemory",
    "cambricon.com/mlu", "cambricon.com/mlu.smlu.vmemory", "cambricon.com/mlu.smlu.vcore", "mthreads.com/sgpu-memory",
    "mthreads.com/sgpu-core", "iluvatar.ai/MR-V100.vCore", "iluvatar.ai/MR-V100.vMem", "kunlunxin.com/vxpu-memory",
    "enflame.com/vgcu", "enflame.com/vgcu-percentage", "aws.amazon.com/neuroncore", "gpu.intel.com/millicores",
    "gpu.intel.com/tiles", "gpu.intel.com/memory.max", "birentech.com/1-2-gpu", "huawei.com/npu-core",
    "hami.io/gpumem-percentage",
)  # fmt: skip
CHOICES = (
    "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid", "nvidia.com/use-gputype", "amd.com/use-gpu-uuid",
    "hygon.com/use-gpuuuid", "hami.io/vgpu-devices-allocated", "hami.io/Ascend310P-devices-allocated",
    "volcano.sh/vgpu-use-gpuuuid", "volcano.sh/vgpu-ids-new", "gpu-memory", "gpu-fraction", "gpu-fraction-num-devices",
    "huawei.com/Ascend310P", "cdi.k8s.io/gpus", "io.kubernetes.cri-o.Devices",
    "nvidia.com/vgpu-mode", "nvidia.com/numa-bind", "cambricon.com/dsmlu-profile", "cambricon.com/dsmlu-assigned",
    "CAMBRICON_DSMLU_PROFILE", "mthreads.com/gpu-index", "mthreads.ai/use-gpuuuid", "gas-allow", "gas-deny",
    "gas-container-cards", "aws.amazon.com/use-neuron-uuid", "AWS_NEURON_IDS", "NEURON_ALLOCATED",
    "BAIDU_COM_DEVICE_IDX", "metax-tech.com/gpu-devices-allocated", "volcano.sh/gpu-index",
    "volcano.sh/vgpu-mode", "hygon.com/nouse-dcutype",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        *((f"resources: {{limits: {{{one}: 8}}}}", f"resources.limits.{one}: is set by Pilotlight: use spec.gpu")
          for one in AMOUNTS),
        *((f"pod: {{resources: {{requests: {{{one}: 8}}}}}}",
           f"pod.resources.requests.{one}: is set by Pilotlight: use spec.gpu") for one in AMOUNTS),
        *((f"pod: {{annotations: {{{one}: x}}}}",
           f"pod.annotations.{one}: is set by Pilotlight, which selects the devices: remove it") for one in CHOICES),
        *((f"env: {{{one}: x}}",
           f"env.{one}: selects devices or changes their limits, which only Pilotlight may do: remove it")
          for one in ("NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DISABLE_CONTROL", "PILOTLIGHT_X",
                      "CUDA_DEVICE_MEMORY_LIMIT_0", "NVIDIA_IMEX_CHANNELS",
                      "CUDA_MPS_PIPE_DIRECTORY", "ZE_AFFINITY_MASK", "NEURON_RT_VISIBLE_CORES",
                      "ONEAPI_DEVICE_SELECTOR", "GPU_DEVICE_ORDINAL", "CUDA_TASK_PRIORITY", "ASCEND_VNPU_SPECS",
                      "CAMBRICON_SPLIT_MEMS", "SYCL_DEVICE_FILTER")),
    ],
)  # fmt: skip
def test_model_that_sets_its_own_devices_or_device_amounts_is_rejected(text: str, line: str) -> None:
    with pytest.raises(DocumentError) as error:
        one(text)
    assert str(error.value) == f"a.yaml: Model a: spec.{line}"


@pytest.mark.parametrize(
    "text",
    ["resources: {limits: {rdma/hca: 1, nvidia.com/hostdev: 1, nvidia.com/sriov_rdma: 1, amd.com/nic: 1}}",
     "resources: {limits: {volcano.sh/other: 1, vpc.amazonaws.com/efa: 1, example.com/gpu: 1}}",
     "env: {CUDA_DEVICE_MAX_CONNECTIONS: '1', CUDA_DEVICE_ORDER: PCI_BUS_ID, NVIDIA_DRIVER_CAPABILITIES: compute}",
     "env: {NEURON_RT_NUM_CORES: '2', ASCEND_GLOBAL_LOG_LEVEL: '3'}",
     "pod: {annotations: {volcano.sh/queue-name: a, k8s.v1.cni.cncf.io/networks: b, nvidia.com/other: c}}",
     "pod: {annotations: {amd.com/note: a, aws.amazon.com/note: b}}",
     "pod: {labels: {app: a, app.kubernetes.io/part-of: b, kueue.x-k8s.io/queue-name: c}}"],
)  # fmt: skip
def test_pod_fields_that_choose_no_device_are_accepted(text: str) -> None:
    assert one(text).name == "a"


def test_guide_lists_all_reserved_device_names() -> None:
    guide = Path("docs/how-to/pods.md").read_text()
    verbs = ("/use-", "/nouse-", "/vgpu-")
    names = (*AMOUNTS_BEGIN, *NETWORK_BEGIN, *(one for one in CHOICES_BEGIN if not one.endswith(verbs)))
    variables = (*document_rules.CHOICES_BEGIN, *document_rules.CHOICES_END)
    missing = [one for one in (*names, *variables) if f"`{one}`" not in guide and f"`{one.rstrip('/')}`" not in guide]
    assert missing == []


def test_resources_and_annotations_of_every_slicing_kind_are_reserved() -> None:
    """New kinds are covered too."""
    for example in EXAMPLES.values():
        parts = [SliceShare(one, one.memory_bytes) for one in example.slicer.inventory(example.node) or ()][:1]
        if parts:
            fields = example.slicer.fields("m-1", parts)
            assert [name for name in fields.limits if not is_device_resource(name)] == []
            assert [name for name in fields.annotations if not is_device_annotation(name)] == []


def test_env_variable_with_value_from_is_rejected_for_a_local_process() -> None:
    of = one("env: {TOKEN: {valueFrom: {secretKeyRef: {name: hub, key: token}}}}")
    with pytest.raises(EngineError, match=r"Model a: spec.env.TOKEN.valueFrom: supported only in pods"):
        build_launcher()(of, "127.0.0.1", 1)


@pytest.mark.parametrize(
    "changed",
    ["image: y", "pullSecret: p", "resources: {requests: {cpu: 2}}", "pod: {labels: {a: b}}",
     "env: {A: {valueFrom: {secretKeyRef: {name: s, key: k}}}}"],
)  # fmt: skip
def test_change_that_requires_a_new_pod_changes_the_spec_hash(changed: str) -> None:
    assert one(changed).spec_hash() != one("image: x").spec_hash()


def test_empty_pod_settings_do_not_change_the_spec_hash() -> None:
    assert one("pod: {}").spec_hash() == one("rollout: {surge: 0}").spec_hash() == one("slots: 4").spec_hash()
    assert one("").spec.pod == Pod()
