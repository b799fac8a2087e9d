"""Runs `pilotlight` with a skewed clock: python -m tests.integration.cluster.support.entry_points.clock_skew SECONDS
WORDS...
"""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta, tzinfo

SKEW_S = float(sys.argv.pop(1))
_true = time.time


class Skewed(datetime):
    """A datetime with the skewed clock."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Skewed:
        return cls.fromisoformat((datetime.now(tz) + timedelta(seconds=SKEW_S)).isoformat())


def main() -> None:
    """Skews the clock for everything that is imported afterwards."""
    time.time = lambda: _true() + SKEW_S
    from autoscaler.kubernetes import leader_election
    from pilotlight.cli.main import cli

    vars(leader_election)["datetime"] = Skewed  # the only module that formats the current date
    cli(prog_name="pilotlight")


if __name__ == "__main__":
    main()
