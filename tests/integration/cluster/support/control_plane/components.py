"""A real Kubernetes control plane as four child processes on loopback: etcd, API server, controllers, scheduler.

Manages the processes and their folder. All ports are chosen, so that several planes can run at the same time. They end
with the process that started them. No kubelet (`tests.integration.cluster.support.kubelet.node`), Service network or
container is here.
"""

from __future__ import annotations

import ctypes
import json
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.harness.faults.sigstop import deliver
from tests.support.net.ports import Ports

HOST = "127.0.0.1"
TOKEN = "admin-of-a-test"
ROLES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
READY_S_MAX = 120.0
PROFILES = Path(__file__).parents[5] / "docs" / "kube-scheduler.yaml"
"""The scheduler profile that the documentation recommends for bin packing of nodes."""
READY_PATHS = ("/readyz", "/api/v1/namespaces/kube-node-lease")
"""The API server is ready. It creates the namespace of the nodes' Leases shortly after that."""
_ports = Ports(range(28_192, 32_000))
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class PlaneError(Exception):
    """A component does not run; the message contains the end of its log."""


class Plane:
    """One control plane. `programs`: a folder with `testplane`, or with the four separately. `more`: flags by role."""

    def __init__(self, folder: Path, programs: Path, more: Mapping[str, Sequence[str]] | None = None) -> None:
        self.folder = folder
        self._programs = programs
        self._more = dict(more or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd, self._peer, self._api, *self._others = free_ports(5)
        self.server = f"https://{HOST}:{self._api}"
        self.kubeconfig = folder / "kubeconfig"
        self.authority = folder / "certs" / "apiserver.crt"
        """The API server signs its own certificate."""

    def start(self) -> None:
        """Returns when the API server is ready and the controllers run. Raises PlaneError."""
        self._write_files()
        self.start_part("etcd")
        self.start_part("kube-apiserver")
        self.until_ready()
        self.start_part("kube-controller-manager")
        self.start_part("kube-scheduler")

    def start_part(self, role: str) -> None:
        """Starts or restarts one of ROLES."""
        together = self._programs / "testplane"
        command = [together, role] if together.exists() else [self._programs / role]
        with (self.folder / f"{role}.log").open("ab") as log:
            words = [*command, *self._flags(role), *self._more.get(role, ())]
            self._processes[role] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=die_with_parent,  # noqa: PLW1509  no threads before it
            )  # fmt: skip

    def signal_part(self, role: str, number: int) -> None:
        """Sends a signal; returns when a SIGSTOP has taken effect."""
        deliver(self._processes[role].pid, number)

    def kill_part(self, role: str) -> None:
        """Sends SIGKILL and waits until the process has exited."""
        process = self._processes.pop(role)
        process.kill()
        process.wait()

    def compact(self) -> None:
        """Compacts etcd's history up to now, through its JSON gateway (/v3/kv/compaction)."""
        at = self._ask_etcd("range", {"key": "Lw=="})["header"]["revision"]  # "/"
        self._ask_etcd("compaction", {"revision": at, "physical": True})

    def _ask_etcd(self, what: str, body: dict[str, object]) -> dict[str, Any]:
        url = f"http://{HOST}:{self._etcd}/v3/kv/{what}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as answer:
            response: dict[str, Any] = json.load(answer)
            return response

    def stop(self) -> None:
        """Kills all processes: their state is no longer needed, and SIGTERM would wait for open watches."""
        for role in reversed(ROLES):
            if role in self._processes:
                self.kill_part(role)

    def until_ready(self) -> None:
        """Waits for the API server."""
        end_s = time.monotonic() + READY_S_MAX
        while not all(map(self._answers, READY_PATHS)):
            for role, process in self._processes.items():
                if process.poll() is not None or time.monotonic() > end_s:
                    words = (self.folder / f"{role}.log").read_text(errors="replace")[-2000:]
                    raise PlaneError(f"{role} does not run (exit status {process.returncode}): {words}")
            time.sleep(0.05)

    def _answers(self, path: str) -> bool:
        if not self.authority.exists():
            return False
        asked = urllib.request.Request(self.server + path, headers={"Authorization": f"Bearer {TOKEN}"})
        try:
            context = ssl.create_default_context(cafile=str(self.authority))  # the file may be incomplete
            with urllib.request.urlopen(asked, timeout=2, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    # --- files and flags ---------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        for name in ("etcd", "certs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        key = self.folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(f'{TOKEN},admin,admin-uid,"system:masters"\n')
        cluster = {"server": self.server, "certificate-authority": str(self.authority)}
        self.kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        }))  # fmt: skip
        (self.folder / "scheduler.yaml").write_text(json.dumps({
            **yaml.safe_load(PROFILES.read_text()),
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(self.kubeconfig), "qps": 1000, "burst": 2000},
        }))  # fmt: skip

    def _flags(self, role: str) -> list[str]:
        here, etcd, peer = self.folder, f"http://{HOST}:{self._etcd}", f"http://{HOST}:{self._peer}"
        managers, scheduler = self._others
        match role:
            case "etcd":
                return [
                    f"--data-dir={here}/etcd", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
                    f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=default={peer}", "--unsafe-no-fsync", "--log-level=warn",
                ]  # fmt: skip
            case "kube-apiserver":
                return [
                    f"--etcd-servers={etcd}", f"--bind-address={HOST}", f"--advertise-address={HOST}",
                    f"--secure-port={self._api}", f"--cert-dir={here}/certs",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    f"--service-account-signing-key-file={here}/sa.key",
                    f"--service-account-key-file={here}/sa.key", "--service-cluster-ip-range=10.96.0.0/16",
                    f"--token-auth-file={here}/tokens.csv", "--authorization-mode=RBAC", "--allow-privileged=true",
                    "--endpoint-reconciler-type=none", "--runtime-config=api/all=true",
                    "--default-not-ready-toleration-seconds=2", "--default-unreachable-toleration-seconds=2",
                ]  # fmt: skip
            case "kube-controller-manager":
                return [
                    f"--kubeconfig={self.kubeconfig}", f"--service-account-private-key-file={here}/sa.key",
                    f"--root-ca-file={self.authority}", "--leader-elect=false", f"--secure-port={managers}",
                    f"--bind-address={HOST}", "--controllers=*", "--kube-api-qps=1000", "--kube-api-burst=2000",
                    # a node's heartbeat comes once a second, and the process that sends it may be paused for 20 s
                    "--node-monitor-period=1s", "--node-monitor-grace-period=40s",
                ]  # fmt: skip
        return [f"--config={here}/scheduler.yaml", f"--secure-port={scheduler}", f"--bind-address={HOST}"]


def free_ports(number: int) -> list[int]:
    """Chooses ports as `tests.support.net.ports` does: above those of engines in pods."""
    return _ports.take(number)


def die_with_parent() -> None:
    """Makes a child process terminate with its parent; called right before exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
