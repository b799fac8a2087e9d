"""Renders the chart like helm and parses the output."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "pilotlight"
Object = dict[str, Any]
Values = dict[str, Any]

EVERYTHING: Values = {
    "gateway": {
        "hpa": {"enabled": True}, "tls": {"secretName": "port"}, "affinity": {"nodeAffinity": {}},
        "tolerations": [{"operator": "Exists"}], "priorityClassName": "high", "podAnnotations": {"a": "b"},
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}}, "extraArgs": ["--events=/state/e"],
    },
    "image": {"digest": "sha256:" + 64 * "a", "pullSecrets": [{"name": "registry"}]},
    "agent": {
        "enabled": True, "runtimeClassName": "nvidia", "nodeSelector": {"gpu": "true"},
        "trust": [{"configMap": "registry"}, {"secret": "signers"}],
    },
    "contract": {"certificates": "certManager", "issuer": {"name": "house", "kind": "ClusterIssuer"}},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "entry", "annotations": {"a": "b"}},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "entry"}], "hostnames": ["llm.example.com"]},
    "networkPolicy": {"enginesEgress": [{"ports": [{"port": 443}]}]},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "p"}}, "alerts": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "settings": {
        "limits": {"bodyBytesMax": "32Mi", "memoryBytes": "auto", "idleSecondsMax": 30}, "leaseSeconds": 10,
        "weights": {
            "caFile": "/trust/registry/ca.crt",
            "signatures": {"policy": "enforce", "keys": ["/trust/signers/cosign.pub"]},
        },
    },
    "tenantsSecret": "tenants", "adoption": {"everywhere": True}, "cordon": {"enabled": True},
    "cutting": {"enabled": True},
}  # fmt: skip
MINIMAL: Values = {
    "gateway": {"replicas": 1, "maxUnavailable": 0, "preStopSeconds": 0},
    "autoscaler": {"replicas": 1, "maxUnavailable": 0}, "networkPolicy": {"enabled": False},
    "engines": {"createNamespace": False},
    "settings": {"auth": "none"},
}  # fmt: skip


def example(name: str) -> Values:
    """Values from a file in examples/."""
    values: Values = yaml.safe_load((ROOT / "examples" / name).read_text())
    return values


AGENTS_OF_A_FABRIC: Values = {
    "agent": {
        "enabled": True,
        "fabric": {
            "enabled": True,
            "restart": [
                {"namespace": "gpu-operator", "labels": "app=nvidia-device-plugin-daemonset"},
                {"namespace": "gpu-operator", "labels": "app=nvidia-dcgm"},
                {"namespace": "nvidia", "labels": "nvidia.com/component=dra,tier=node"},
            ],
        },
    },
    "settings": {
        "capacity": [
            {
                "name": "pod2",
                "redfish": {
                    "url": "https://fabric.example",
                    "systems": {"worker-1": "/redfish/v1/Systems/1"},
                    "agents": True,
                },
            }
        ]
    },
}
"""The only privileged set, so assertions on all SETS do not apply to it."""
SETS: dict[str, Values] = {
    "defaults": {},
    "minimal": MINIMAL,
    "everything": EVERYTHING,
    "namespaced": {"scope": "namespace", "tenantsSecret": "tenants", "adoption": {"namespaces": ["home"]}},
    "namespaced and minimal": {**MINIMAL, "scope": "namespace"},
    "certificates of one's own": {
        "contract": {"auth": "certificate", "certificates": "secret", "secret": {"server": "a", "client": "b"}}
    },
    "kubeai": {"adoption": {"kubeai": True}},
    "fabric": {"settings": {"capacity": [{"name": "rack", "cro": {"model": "NVIDIA-A100-PCIE-40GB"}}]}},
    "nodes": {
        "settings": {
            "capacity": [
                {"name": "g4", "karpenter": {"nodePool": "g4-nodepool"}},
                {"name": "t4", "clusterAutoscaler": {"nodeLabels": {"cloud.google.com/gke-nodepool": "t4"}}},
            ]
        }
    },
    "composed": {
        "settings": {
            "capacity": [
                {
                    "name": "pod2",
                    "redfish": {
                        "url": "https://fabric.example",
                        "secretRef": "fabric",
                        "systems": {"worker-1": "/redfish/v1/Systems/1"},
                    },
                }
            ]
        }
    },
    "published": {
        "settings": {
            "capacity": [
                {
                    "name": "pod2",
                    "redfish": {
                        "url": "https://fabric.example",
                        "secretRef": "fabric",
                        "systems": {"worker-1": "/redfish/v1/Systems/1"},
                        "publish": True,
                    },
                }
            ]
        }
    },
    "kueue": {"settings": {"capacity": [{"name": "queue", "kueue": {"localQueue": "serving"}}]}},
    "queued": {
        "settings": {"capacity": [{"name": "dws", "provisioningRequest": {"class": "queued-provisioning.gke.io"}}]}
    },
    "adopting": {"adoption": {"namespaces": ["team-a", "team-b"]}},
    "agents": {"agent": {"enabled": True, "runtimeSocket": "/run/containerd/containerd.sock"}},
    "agents with certificates": {
        "agent": {"enabled": True, "podResourcesPath": ""},
        "contract": {"auth": "certificate"},
    },
    "agents in the release's namespace": {
        "agent": {"enabled": True, "namespace": "home"},
        "contract": {"certificates": "certManager", "issuer": {"kind": "Issuer", "name": "local"}},
    },
    "agents in the engines' namespace": {
        "agent": {"enabled": True, "namespace": "shared", "createNamespace": False},
        "engines": {"namespace": "shared", "createNamespace": False},
    },
    "addresses of version 6": {"listenHost": "[::]", "fullnameOverride": "house"},
    "openshift": {
        "openshift": True,
        "enabled": True,
        "global": {"registry": "r.example"},
        "agent": {"enabled": True},
        "networkPolicy": {"dnsPorts": [53, 1053]},
    },
    "labelled": {
        "gateway": {
            "podLabels": {"team": "ml"},
            "podAnnotations": {"a": "gateway"},
            "service": {
                "type": "LoadBalancer",
                "ipFamilyPolicy": "PreferDualStack",
                "loadBalancerClass": "service.k8s.aws/nlb",
            },
        },
        "autoscaler": {"podLabels": {"team": "ml"}, "podAnnotations": {"a": "autoscaler"}},
        "agent": {
            "enabled": True,
            "podLabels": {"azure.workload.identity/use": "true"},
            "podAnnotations": {"a": "agent"},
            "priorityClassName": "system-node-critical",
            "affinity": {"nodeAffinity": {}},
        },
        "doctor": {
            "podLabels": {"team": "ml"},
            "podAnnotations": {"a": "b"},
            "resources": {"limits": {"cpu": "100m", "memory": "256Mi"}},
        },
    },
    "local": example("values-local.yaml"),
    "eks": example("values-eks.yaml"),
    "on-prem with MIG and a fabric": example("values-onprem-mig-fabric.yaml"),
    "gke-dws": example("values-gke-dws.yaml"),
}
EVERY_SET: dict[str, Values] = {**SETS, "agents of a fabric": AGENTS_OF_A_FABRIC}
"""For assertions that privileged pods also meet."""


@functools.cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


AGENTS_NAME: Final = "home-pl-pilotlight-be36f1d0"
"""Prefix of the names of objects in the agents' namespace."""


def texts(values: Values, name: str = "pl", namespace: str = "home") -> dict[str, str]:
    """Template -> rendered text. Raises helm_python.HelmError."""
    return {path.rpartition("templates/")[2]: text for path, text in
            _chart().render(values, name=name, namespace=namespace).items()}  # fmt: skip


def objects(values: Values) -> list[Object]:
    """All rendered objects."""
    return list(_documents(json.dumps(values, sort_keys=True)))


@functools.cache
def _documents(values: str) -> tuple[Object, ...]:
    found = (text for path, text in texts(json.loads(values)).items() if not path.endswith(".txt"))
    return tuple(one for text in found for one in yaml.load_all(text, yaml.CSafeLoader) if one)


def of_kind(values: Values, *kinds: str) -> list[Object]:
    """The rendered objects of these kinds."""
    return [one for one in objects(values) if one["kind"] in kinds]


def named(values: Values, kind: str, name: str) -> Object:
    """The rendered object of that kind and name."""
    (found,) = (one for one in of_kind(values, kind) if one["metadata"]["name"] == name)
    return found


def pod_specs(values: Values) -> Iterator[tuple[str, Object]]:
    """(component, pod spec) of each workload."""
    for one in objects(values):
        if one["kind"] == "Pod":
            yield one["metadata"]["labels"]["app.kubernetes.io/component"], one["spec"]
        elif one["kind"] in {"Deployment", "DaemonSet"}:
            template = one["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]
