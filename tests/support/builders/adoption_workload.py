"""A handmade adopted workload: what its watch reports, its pods in one line each, and its observations."""

from __future__ import annotations

from typing import Any

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.kubernetes.adoption.annotations import read_model
from autoscaler.drivers.kubernetes.adoption.objects import AdoptedPodSeen, WorkloadKey, WorkloadSeen
from autoscaler.drivers.kubernetes.adoption.workload import Mode, Workload
from autoscaler.spec.model import ADOPTED_HASH
from autoscaler.state.world import Replica, ReplicaResources

KEY = WorkloadKey("Deployment", "default", "ada")


def annotated(notes: dict[str, str] | None = None, **more: Any) -> WorkloadSeen:
    """An annotated Deployment that is scaled to zero, as in its manifest."""
    facts: dict[str, Any] = {
        "key": KEY, "uid": "u", "version": 1, "named_unix_s": 100, "selector": "app=ada", "container": "engine",
        "notes": tuple(sorted((notes or {"pilotlight.dev/models": "ada"}).items())), "replicas": 0, "ours": False,
        "scaled_by": "helm", "scaled_unix_s": 100.0, "since_adopted": False, "trouble": "", **more,
    }  # fmt: skip
    return WorkloadSeen(**facts)


class Bench:
    """A Workload, its observations, and pods created in one line each."""

    def __init__(self, replicas: int = 0, mode: Mode = Mode.LEVEL, key: WorkloadKey = KEY) -> None:
        self.seen = annotated(replicas=replicas, key=key)
        self.model = read_model(self.seen)
        self.core = Workload(self.seen, self.model, mode)
        self.now_s = 0.0
        self.pods: dict[str, AdoptedPodSeen] = {}

    def pod(self, name: str, **more: Any) -> None:
        """Adds or changes a pod. It runs, unless `more` says otherwise."""
        facts: dict[str, Any] = {
            "name": name, "uid": f"uid-{name}", "rank": 0, "replica": "", "intent": "", "goes_first": False,
            "created": f"2026-01-01T00:00:0{len(self.pods)}Z", "ip": "10.0.0.1", "port": 8080, "probe_port": 8080,
            "path": "/", "kubelet_decides": False, "held": False, "ready": False, "started_unix_s": 1.0, "ended": "",
            "over": False, "waits": "", "leaving": False,
        }  # fmt: skip
        if name in self.pods:
            facts = self.pods[name]._asdict()
        self.pods[name] = AdoptedPodSeen(**{**facts, **more})
        self.core.see_pod(f"uid-{name}", self.pods[name], self.now_s)

    def ready(self, name: str) -> None:
        self.core.answered(f"uid-{name}", True, self.now_s)

    def delete_pod(self, name: str) -> None:
        self.core.see_pod(f"uid-{name}", None, self.now_s)
        del self.pods[name]

    def scaled(self, replicas: int, **more: Any) -> None:
        """The watch reports the workload with that scale."""
        self.seen = self.seen._replace(replicas=replicas, version=self.seen.version + 1, **more)
        self.core.see(self.seen, self.model, self.core.mode, self.now_s)

    def write(self) -> int | None:
        """Returns what the shell writes; the watch reports it at once."""
        level = self.core.level()
        if level is None:
            self.core.nothing_to_write(self.now_s)
        else:
            self.core.wrote(level, self.seen.version + 1, self.now_s)
            self.scaled(level)
        return level

    def take_reports(self) -> list[tuple[str, str]]:
        return [(one.id, one.seen.value) for one in self.core.take()]

    def order(self, name: str) -> Replica:
        return Replica(
            id=ReplicaId(name),
            model=ModelName("ada"),
            spec_hash=ADOPTED_HASH,
            intent=f"i-{name}",
            slots=4,
            resources=ReplicaResources(slices=(), memory_bytes=0),
        )

    def start(self, name: str) -> None:
        self.core.start(self.order(name), self.now_s)

    def stop(self, name: str) -> None:
        self.core.stop(self.order(name), self.now_s)


def running(count: int, **more: Any) -> Bench:
    """Replicas r0, r1, ... on ready pods p0, p1, ..., which were ordered."""
    bench = Bench(**more)
    bench.core.begin(0.0)
    for number in range(count):
        bench.start(f"r{number}")
    bench.write()
    for number in range(count):
        rank = number if bench.seen.key.kind == "StatefulSet" else 0
        bench.pod(f"p{number}", rank=rank)
        bench.ready(f"p{number}")
    bench.take_reports()
    return bench
