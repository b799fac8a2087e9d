"""`pilotlight` with shorter limits for starts that wait: python -m
tests.integration.cluster.support.entry_points.short_start_limits WORDS...
"""

from __future__ import annotations

DOCUMENTED_S = 60.0
"""The limit without this entry point."""
LIMIT_S, LOOK_S = 3.0, 0.2


def main() -> None:
    """Shortens the limits and the interval of reading Events, which affect nothing else, and runs the CLI."""
    from autoscaler.drivers.kubernetes import volume_failures
    from autoscaler.drivers.kubernetes.adoption import workload
    from autoscaler.drivers.kubernetes.objects import pod_state
    from pilotlight.cli.main import cli

    copies = vars(volume_failures), vars(workload)
    assert pod_state.IMAGE_S_MAX == pod_state.INJECTED_S_MAX == DOCUMENTED_S
    assert all(copy["IMAGE_S_MAX"] == DOCUMENTED_S for copy in copies)
    for limits in (pod_state._PATIENCE_S, pod_state._INIT_PATIENCE_S):
        assert {*limits.values()} <= {0.0, DOCUMENTED_S}
        limits.update({reason: LIMIT_S for reason, limit_s in limits.items() if limit_s})
    vars(pod_state).update(IMAGE_S_MAX=LIMIT_S, INJECTED_S_MAX=LIMIT_S)
    for copy in copies:
        copy["IMAGE_S_MAX"] = LIMIT_S
    vars(volume_failures)["LOOK_S"] = LOOK_S
    cli(prog_name="pilotlight")


if __name__ == "__main__":
    main()
