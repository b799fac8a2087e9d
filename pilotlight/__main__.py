"""Starts the command line after checking that the installed packages are Pilotlight's own.

PyPI has packages named `artifacts` and `autoscaler` with the same top-level names. Installed after Pilotlight, they
would overwrite its files one by one, so each process checks this first.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

OURS = ("gateway", "autoscaler", "artifacts", "loadtest")
TRACEBACK = "PILOTLIGHT_TRACEBACK"
"""Environment variable that adds the traceback to an internal error."""
CALLS_MAX = 8
"""Innermost stack frames named in an internal error."""


def find_foreign_package() -> str | None:
    """Return an error message for the first package that is missing or foreign, or None if all are Pilotlight's."""
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


def report_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an unexpected exception in one line: its class, and where in Pilotlight it was raised.

    The message is omitted, since it may contain a prompt or a key. Installed as `sys.excepthook`; KeyboardInterrupt and
    SystemExit keep Python's own handling.
    """
    from pilotlight.safe_output import QuietStderr, write_stderr

    if not issubclass(kind, Exception) and not isinstance(error, BaseExceptionGroup):
        sys.__excepthook__(kind, error, trace)
        return
    if os.environ.get(TRACEBACK):
        QuietStderr().write("".join(traceback.format_exception(kind, error, trace)))
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    calls = [call for frame in reversed(traceback.extract_tb(error.__traceback__)) if (call := _call(frame))]
    where = f" in {' < '.join(calls[:CALLS_MAX])}" if calls else ""
    write_stderr(
        f"internal error: {type(error).__name__}{where}; please report this line. "
        f"{TRACEBACK}=1 in the environment adds the traceback"
    )


def _call(frame: traceback.FrameSummary) -> str:
    """Return the frame as `pilotlight/cli/status.py:100`, or an empty string for a frame of a library."""
    folder, file = Path(__file__).parents[1], Path(frame.filename)
    path = file.relative_to(folder) if file.is_relative_to(folder) else file
    return f"{path}:{frame.lineno}" if path.parts[0] in {*OURS, "pilotlight"} else ""


def main() -> None:
    """The `pilotlight` command."""
    sys.excepthook = report_exception
    problem = find_foreign_package()
    if problem is not None:
        sys.stderr.write(f"pilotlight: {problem}\n")
        sys.exit(1)
    from pilotlight.cli.main import cli

    cli(prog_name="pilotlight")


if __name__ == "__main__":
    main()
