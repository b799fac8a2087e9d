"""Which pod a process belongs to, by its control group, as kubelets name them. Pure.

Owns the two forms of that name (the systemd and the cgroupfs driver's); the pod's uid is in both. A process of no pod
has none.
"""

from __future__ import annotations

import re

_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
_POD = re.compile(rf"/(?:kubepods[a-z-]*-)?pod({_UID})(?:\.slice)?(?:/|$)", re.MULTILINE)


def pod_uid(cgroup: str) -> str:
    """The uid of the pod in the text of /proc/PID/cgroup; empty: it is in none."""
    found = _POD.search(cgroup) if "kubepods" in cgroup else None
    return found[1].replace("_", "-") if found is not None else ""
