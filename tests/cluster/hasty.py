"""`pilotlight` whose waiting is short where nodes are cut anew: python -m tests.cluster.hasty WORDS..."""

from __future__ import annotations

import os

WAIT_S, EVERY_S, NODE_EVERY_S, RETRY_S = 1.0, 1.0, 2.0, (1.5, 1.5)
SETTLE = "HASTY_SETTLE_SECONDS"
"""What a test sets that kills a leader between the ConfigMap and the node: for so long it may look for the one."""
SETTLE_S = 1.0


def main() -> None:
    """How long each is, nothing else depends on."""
    from autoscaler.drivers.kubernetes.inventory.mig_manager import NodeCutter
    from autoscaler.queries import mig_status
    from autoscaler.rearrange import mig_repartition
    from pilotlight.cli.main import cli

    vars(mig_repartition).update(WAIT_S=WAIT_S, EVERY_S=EVERY_S, NODE_EVERY_S=NODE_EVERY_S)
    vars(mig_status).update(RETRY_S=RETRY_S)
    defaults = NodeCutter.__init__.__kwdefaults__ or {}
    assert defaults.keys() == {"settle_s"}
    defaults["settle_s"] = float(os.environ.get(SETTLE, SETTLE_S))
    cli(prog_name="pilotlight")


if __name__ == "__main__":
    main()
