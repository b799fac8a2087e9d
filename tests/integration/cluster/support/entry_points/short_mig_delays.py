"""`pilotlight` with shorter MIG repartitioning delays: python -m
tests.integration.cluster.support.entry_points.short_mig_delays WORDS...
"""

from __future__ import annotations

import os

WAIT_S, EVERY_S, NODE_EVERY_S, RETRY_S = 1.0, 1.0, 2.0, (1.5, 1.5)
SETTLE = "HASTY_SETTLE_SECONDS"
"""Variable for tests that kill a leader between the writes of the ConfigMap and of the node: settle time in seconds."""
SETTLE_S = 1.0


def main() -> None:
    """Shortens the delays, which affect nothing else, and runs the CLI."""
    from autoscaler.drivers.kubernetes.inventory.mig_manager import NodeCutter
    from autoscaler.queries import mig_status
    from autoscaler.rearrange import mig_repartition
    from pilotlight.cli.main import cli

    vars(mig_repartition).update(WAIT_S=WAIT_S, EVERY_S=EVERY_S, NODE_EVERY_S=NODE_EVERY_S)
    vars(mig_status).update(RETRY_S=RETRY_S)
    defaults = NodeCutter.__init__.__kwdefaults__ or {}
    assert "settle_s" in defaults
    defaults["settle_s"] = float(os.environ.get(SETTLE, SETTLE_S))
    cli(prog_name="pilotlight")


if __name__ == "__main__":
    main()
