"""The node of the cluster benchmarks: `python -m bench.clusternode KUBECONFIG NAME GPUS LOGS`, until SIGTERM.

Probes have whole-second periods, as in manifests, so they do not shorten a start.
"""

from __future__ import annotations

import sys
from pathlib import Path

from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.kubeconfig import load_api_access
from pilotlight import process
from tests.integration.cluster.support.kubelet.node import Node

NUMBER = 1


async def live(kubeconfig: Path, name: str, gpus: str, logs: Path) -> None:
    """Run the node."""
    stop = process.stop_event()
    amounts, labels = {"nvidia.com/gpu": gpus}, {"test": name, "nvidia.com/gpu.memory": "81920"}
    way = await load_api_access(kubeconfig)
    async with Api(way, agent="kubelet") as api, Node(api, name, NUMBER, amounts, labels, logs).running():
        await stop.wait()


if __name__ == "__main__":
    process.run(live(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])))
