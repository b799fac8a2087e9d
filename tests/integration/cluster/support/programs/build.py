"""Builds the test plane's programs once for each set of sources, Go version and platform, into the project's cache.

Creates the cache's folders: `testplane-KEY` with `testplane` (etcd, API server, controllers, scheduler, kubectl) and
`kwok` (simulated nodes and pods), and `karpenter-KEY` with Karpenter and its provider for such nodes, which only its
own tests need. A cold build takes about five minutes on two cores.

    python -m tests.integration.cluster.support.programs.build [karpenter]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.go_programs import BuildError, Sources, build

_HERE = Path(__file__).parent
_VARIABLE = "PILOTLIGHT_TESTPLANE"
TESTPLANE = Sources(
    "testplane", "Kubernetes' control plane for tests", _HERE / "testplane",
    (("kwok", "sigs.k8s.io/kwok/cmd/kwok"), ("testplane", ".")), _VARIABLE, minutes=5,
)  # fmt: skip
KARPENTER = Sources(
    "karpenter", "Karpenter for tests", _HERE / "karpenter", (("karpenter", "sigs.k8s.io/karpenter/kwok"),), _VARIABLE,
    minutes=5, definitions=("sigs.k8s.io/karpenter/pkg/apis/crds", "sigs.k8s.io/karpenter/kwok/apis/crds"),
)  # fmt: skip


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build(KARPENTER if sys.argv[1:] == ['karpenter'] else TESTPLANE)}\n")
    except BuildError as error:
        sys.exit(str(error))
