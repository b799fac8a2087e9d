"""An object of each kind that the product watches, by the last part of its path, with every field that is read."""

from __future__ import annotations

from typing import Any, Final

Object = dict[str, Any]


def _metadata(name: str, **more: Any) -> Object:
    return {
        "name": name, "namespace": "models", "uid": "u-1", "resourceVersion": "7", "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"app": "a"}, "annotations": {}, **more,
    }  # fmt: skip


_P = "pilotlight.dev/"
_CONTAINER: Final = {
    "name": "engine", "image": "x", "ports": [{"name": "http", "containerPort": 20_001}],
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": "1",
    "nvidia.com/gpumem": "1000"}},
    "lifecycle": {"preStop": {"sleep": {"seconds": 20}}},
    "readinessProbe": {"httpGet": {"path": "/health", "port": "http", "scheme": "HTTP"}},
}  # fmt: skip
_STATES: Final = [
    {"name": "engine", "ready": True, "restartCount": 0, "state": {"running": {"startedAt": "2026-01-01T00:00:01Z"}}}
]
_CONDITIONS: Final = [
    {"type": "Ready", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"},
    {"type": "PodReadyToStartContainers", "status": "True"},
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"},
    {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "m"},
]
_HAMI: Final = {
    "hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,1000,10:;", "hami.io/vgpu-node": "n1",
    "runai-gpu-group": "g", "gpu-fraction": "0.5",
}  # fmt: skip
POD: Final[Object] = {
    "kind": "Pod",
    "metadata": _metadata(
        "ada-1",
        labels={"app.kubernetes.io/managed-by": "pilotlight", _P + "intent": "i", "pod-template-hash": "h",
        "app": "ada"},
        generateName="ada-h-",
        ownerReferences=[{"kind": "ReplicaSet", "name": "ada-h", "uid": "u", "controller": True}],
        annotations={
            _P + "replica": "ada-1", _P + "model": "ada", _P + "spec-hash": "h", _P + "intent": "i",
            _P + "slices": "n1/gpu0",
            _P + "memory-bytes": "1", _P + "compute-percent": "100", _P + "slots": "4",
            _P + "readiness-path": "/health",
            _P + "tls-name": "a", _P + "drain": "1", _P + "weights": "copies/a", **_HAMI,
        },
    ),
    "spec": {
        "containers": [_CONTAINER], "initContainers": [{**_CONTAINER, "name": "first", "restartPolicy": "Always"}],
        "nodeName": "n1",
        "terminationGracePeriodSeconds": 30, "resourceClaims": [{"name": "c", "resourceClaimName": "ada-1"}],
        "overhead": {"cpu": "100m", "memory": "1Mi"}, "resources": {"requests": {"cpu": "2"}},
    },
    "status": {
        "phase": "Running", "podIP": "10.0.0.1", "reason": "Evicted", "message": "m", "conditions": _CONDITIONS,
        "containerStatuses": _STATES,
    },
}  # fmt: skip
_WAITING: Final = {
    **POD,
    "status": {
        "phase": "Pending",
        "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "m"}}}],
    },
}
_ENDED: Final = {
    **POD,
    "status": {
        "phase": "Failed",
        "containerStatuses": [
            {"name": "engine", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "m"}}}
        ],
    },
}
NODE: Final[Object] = {
    "kind": "Node",
    "metadata": _metadata(
        "n1",
        namespace="",
        labels={
            "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920",
            "nvidia.com/gpu.count": "2",
            "nvidia.com/mig.strategy": "mixed", "nvidia.com/mig.config": "all-1g.10gb",
            "nvidia.com/mig.config.state": "success",
            "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing",
            "nvidia.com/mig-1g.10gb.count": "7",
            "nvidia.com/mig-1g.10gb.memory": "9728", "karpenter.sh/nodepool": "p",
            "nvidia.com/device-plugin.config": "default",
        },
        annotations={
            "hami.io/node-nvidia-register": '[{"id":"GPU-1","count":10,"devmem":81920,"devcore":100,"type":"NVIDIA"}]',
            "hami.io/node-handshake": "Reported 2026-01-01 00:00:00",
            _P + "cordon": '[{"place":{"kind":"device","name":"n1/gpu0"},"since_unix_s":1.0}]',
            _P + "cut": '{"config":"c","cuts":{},"tries":1,"asked_unix_s":1.0}', _P + "devices-max": "8",
        },
    ),
    "spec": {"unschedulable": False, "taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}],
    "providerID": "x"},
    "status": {
        "allocatable": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "2", "nvidia.com/mig-1g.10gb": "7"},
        "capacity": {"nvidia.com/gpu": "2"}, "conditions": _CONDITIONS,
        "nodeInfo": {"bootID": "b", "kubeletVersion": "v1.34.0", "containerRuntimeVersion": "containerd://2.1.4"},
        "images": [{"names": ["a@sha256:" + "a" * 64, "a:1"], "sizeBytes": 1_000}],
    },
}  # fmt: skip
_PLUGIN: Final = """version: v1
flags: {migStrategy: none}
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
"""
_ATTRIBUTES: Final = {
    "uuid": {"string": "GPU-1"}, "productName": {"string": "NVIDIA A100"}, "type": {"string": "gpu"},
    "profile": {"string": "1g.10gb"},
    "parentUUID": {"string": "GPU-1"}, "index": {"int": 0}, "driverVersion": {"version": "1.2.3"}, "x": {"bool": True},
}  # fmt: skip
SLICE: Final[Object] = {
    "kind": "ResourceSlice",
    "metadata": _metadata("s1", namespace=""),
    "spec": {
        "driver": "gpu.nvidia.com", "nodeName": "n1", "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        "sharedCounters": [{"name": "gpu-0", "counters": {"memory": {"value": "80Gi"},
        "memory-slice-0": {"value": "1"}}}],
        "devices": [
            {"name": "gpu-0", "attributes": _ATTRIBUTES, "capacity": {"memory": {"value": "80Gi"}}, "nodeName": "n1",
             "consumesCounters": [{"counterSet": "gpu-0", "counters": {"memory": {"value": "80Gi"}}}],
             "taints": [{"key": "a", "effect": "NoSchedule"}], "bindingConditions": ["b"],
             "allowMultipleAllocations": True},
            {"name": "gpu-1", "basic": {"attributes": _ATTRIBUTES, "capacity": {"memory": "80Gi"}}},
        ],
    },
}  # fmt: skip
CLAIM: Final[Object] = {
    "kind": "ResourceClaim",
    "metadata": _metadata("ada-1", labels={"app.kubernetes.io/managed-by": "pilotlight", _P + "intent": "i"}),
    "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
    "status": {
        "allocation": {
            "devices": {"results": [
                {"request": "r", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0", "shareID": "s",
                 "consumedCapacity": {"memory": "10Gi"}, "bindingConditions": ["b"],
                 "bindingFailureConditions": ["f"]},
            ]},
            "allocationTimestamp": "2026-01-01T00:00:00Z",
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In",
            "values": ["n1"]}]}]},
        },
        "reservedFor": [{"resource": "pods", "name": "ada-1", "uid": "u-1"}],
        "devices": [{"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0", "conditions": _CONDITIONS,
        "data": {}}],
    },
}  # fmt: skip
_TEMPLATE: Final = {"metadata": {"labels": {"app": "ada"}}, "spec": {"containers": [_CONTAINER]}}
DEPLOYMENT: Final[Object] = {
    "kind": "Deployment",
    "metadata": _metadata(
        "ada",
        annotations={
            _P + "models": "ada, b", _P + "slots": "4", _P + "replicas-min": "0", _P + "replicas-max": "2",
            _P + "idle-seconds": "60", _P + "port": "8080", "lingo.substratus.ai/models": "a,b",
        },
        managedFields=[
            {"manager": "kubectl", "operation": "Update", "time": "2026-01-01T00:00:00Z", "subresource": "scale",
             "fieldsV1": {"f:spec": {"f:replicas": {}}, "f:metadata": {"f:annotations": {"f:" + _P + "models": {}}}}},
        ],
    ),
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "ada"}, "matchExpressions": [{"key": "a", "operator": "In",
        "values": ["b"]}]},
        "template": _TEMPLATE,
    },
    "status": {"conditions": [*_CONDITIONS, {"type": "ReplicaFailure", "status": "True", "message": "m"}]},
}  # fmt: skip
_MODEL: Final[Object] = {
    "kind": "Model",
    "metadata": _metadata("ada"),
    "spec": {
        "engine": "vllm", "image": "x", "artifact": "oci://registry.example/ada:1", "aliases": ["a"], "args": ["--x"],
        "env": {"A": "b"},
        "gpu": {"count": 1, "memory": "16Gi"}, "replicas": {"min": 0, "max": 2}, "idleSeconds": 60,
        "pod": {"affinity": {"podAffinity": {}}, "labels": {"a": "b"}, "volumes": [{"name": "v", "emptyDir": {}}]},
    },
    "status": {"conditions": _CONDITIONS, "learned": {"readySeconds": 5.0}},
}  # fmt: skip
_KUBEAI: Final[Object] = {
    "kind": "Model",
    "metadata": _metadata("ada"),
    "spec": {
        "url": "hf://a/b", "engine": "VLLM", "features": ["TextGeneration"], "resourceProfile": "nvidia-gpu-l4:1",
        "minReplicas": 0,
        "maxReplicas": 2, "args": ["--x"], "env": {"A": "b"}, "files": [{"path": "/a", "content": "b"}], "owner": "o",
        "adapters": [{"name": "a", "url": "hf://a/c"}], "targetRequests": 10, "scaleDownDelaySeconds": 30,
    },
}  # fmt: skip
_SCALER: Final[Object] = {
    "kind": "HorizontalPodAutoscaler", "metadata": _metadata("h"),
    "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "ada"}, "minReplicas": 1},
}  # fmt: skip
_KEYS: Final = [{"sha256": "a" * 64, "name": "k"}]

SEEDS: Final[dict[str, tuple[Object, ...]]] = {
    "pods": (POD, _WAITING, _ENDED),
    "nodes": (NODE,),
    "configmaps": ({"kind": "ConfigMap", "metadata": _metadata("nvidia-device-plugin"),
    "data": {"default": _PLUGIN}},),
    "resourceslices": (SLICE,),
    "resourceclaims": (CLAIM,),
    "resourcequotas": (
        {"kind": "ResourceQuota", "metadata": _metadata("q"), "spec": {"hard": {"requests.nvidia.com/gpu": "2"}},
         "status": {"used": {"requests.nvidia.com/gpu": "1"}}},
    ),
    "limitranges": (
        {"kind": "LimitRange", "metadata": _metadata("l"),
         "spec": {"limits": [{"type": "Container", "default": {"memory": "1Gi"}}]}},
    ),
    "poddisruptionbudgets": (
        {"kind": "PodDisruptionBudget", "metadata": _metadata("b"),
         "spec": {"selector": {"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "a", "operator": "Exists"}]}},
         "status": {"observedGeneration": 1, "disruptionsAllowed": 1}},
    ),
    "leases": ({"kind": "Lease", "metadata": _metadata("pilotlight"), "spec": {"holderIdentity": "a",
    "leaseTransitions": 1}},),
    "models": (_MODEL, _KUBEAI),
    "tenants": ({"kind": "Tenant", "metadata": _metadata("team"), "spec": {"keys": _KEYS, "models": ["ada"],
    "weight": 1.5}},),
    "deployments": (DEPLOYMENT,),
    "statefulsets": ({**DEPLOYMENT, "kind": "StatefulSet"},),
    "horizontalpodautoscalers": (_SCALER,),
    "scaledobjects": ({**_SCALER, "kind": "ScaledObject"},),
    "composabilityrequests": (
        {"kind": "ComposabilityRequest",
         "metadata": _metadata("r", annotations={_P + "lease-a": '{"provider":"cro","lease":"a"}'}, finalizers=["f"]),
         "spec": {"resource": {"type": "gpu", "model": "NVIDIA-A100-PCIE-80GB", "size": 1, "target_node": "n1",
                               "allocation_policy": "samenode", "other_spec": {}}},
         "status": {"state": "Running", "error": "", "resources": {"a": {"state": "Online", "device_id": "GPU-1",
         "node_name": "n1"}}}},
    ),
    "composableresources": (
        {"kind": "ComposableResource", "metadata": _metadata("a", labels={"app.kubernetes.io/managed-by": "r",
        _P + "lease": "a"}),
         "spec": {"type": "gpu", "model": "NVIDIA-A100-PCIE-80GB", "target_node": "n1", "force_detach": False},
         "status": {"state": "Online", "device_id": "GPU-1", "cdi_device_id": "c", "error": ""}},
    ),
}  # fmt: skip
