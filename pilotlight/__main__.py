"""Starts the command line, after making sure that the packages beside it are ours.

PyPI has packages named `artifacts` and `autoscaler` whose top-level names are the same; installed later than
Pilotlight they would replace ours, file by file. So the first thing a process does is look.
"""

from __future__ import annotations

import importlib
import sys

OURS = ("gateway", "autoscaler", "artifacts", "loadtest")


def foreign() -> str | None:
    """The first of our package names that is missing or somebody else's, in a sentence; None when all are ours."""
    for name in OURS:
        try:
            package = importlib.import_module(name)
        except ImportError:
            return f"the package {name!r} is missing: reinstall with `pip install --force-reinstall pilotlight`"
        if getattr(package, "PILOTLIGHT", None) is not True:
            return (
                f"the package {name!r} is not Pilotlight's: another distribution has a package of that name. "
                "Install Pilotlight in a virtual environment of its own"
            )
    return None


def main() -> None:
    """The `pilotlight` command."""
    problem = foreign()
    if problem is not None:
        sys.stderr.write(f"pilotlight: {problem}\n")
        sys.exit(1)
    from pilotlight.cli import cli

    cli(prog_name="pilotlight")


if __name__ == "__main__":
    main()
