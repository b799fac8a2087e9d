"""`make bench-cluster`: Pilotlight on a real Kubernetes control plane, compared with the same engine started by hand.

Runs all parts, or those named on the command line. Each part prints its table while it runs. The last line is one JSON
object (interfaces, section 10). `QUICK=1` uses fewer rounds of the same sizes. The exit status is 0 if all parts ran to
their end, whatever the figures; only `webhook` fails if one of its figures exceeds its limit.
"""

from __future__ import annotations

from bench import (
    clusterfold,
    clusterinstallations,
    clusterlead,
    clusterpoison,
    clusterscale,
    clusterwake,
    clusterwebhook,
    parts,
)

KEYS = (
    "create_ms_p99", "scale_ms_p99", "first_byte_ms_p99", "cold_s_mean", "failed", "rss_mib", "sync_s", "cpu_core",
    "folded_per_s", "requests_per_start", "failover_s", "clean_stop_s", "poisoned", "poison_exits",
    "poison_ratio", "poison_ratio_max", "installations_deleted", "installations_twice", "installations_writes",
    "webhook_slow_s", "webhook_away_s", "etcd_error_s",
)  # fmt: skip
PARTS: dict[str, parts.Part] = {
    "fold": clusterfold.measure,
    "wake": clusterwake.measure,
    "scale": clusterscale.measure,
    "lead": clusterlead.measure,
    "poison": clusterpoison.measure,
    "installations": clusterinstallations.measure,
    "webhook": clusterwebhook.measure,
}
"""The parts, in the order in which they run."""


if __name__ == "__main__":
    parts.main("cluster", __doc__, KEYS, PARTS)
