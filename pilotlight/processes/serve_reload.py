"""Reloads the documents of `pilotlight serve` on SIGHUP. I/O."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from autoscaler.documents.document_types import Documents
from autoscaler.documents.render import to_yaml
from autoscaler.drivers.local.state_directory import replace_file
from autoscaler.exception_handling import reraise_memory_error
from autoscaler.text import format_count
from pilotlight.models.document_loading import gather_documents, problem_file
from pilotlight.processes.serve_options import ServeOptions, check_serve_options
from pilotlight.safe_output import escape_text, one_line, write_stderr

PROBLEM_CHARACTERS_MAX = 2000


def note_problem(documents: Path, problem: str) -> None:
    """Store the reason of a failed reload, which the autoscaler serves to `status`; empty: the reload succeeded."""
    with contextlib.suppress(OSError):  # the problem was already logged
        path = problem_file(documents)
        if problem:
            replace_file(path, escape_text(one_line(problem), PROBLEM_CHARACTERS_MAX).encode())
        else:
            path.unlink(missing_ok=True)


def report_undecoded(documents: Documents) -> None:
    """Print a line for each Model whose document raised an exception. The autoscaler decodes it again."""
    for name, found in documents.undecoded.items():
        write_stderr(f"{found.source}: Model {name}: internal error ({found.reason}); please report it")


class Reload:
    """Reloads the documents of `serve` on SIGHUP; an error is reported in one line and changes nothing.

    GGUF files and folders on the command line and the stored keys are also read again. A file that cannot be served is
    skipped, so that it does not block other changes.
    """

    def __init__(self, options: ServeOptions, documents: Documents, path: Path) -> None:
        self._options = options
        self._begun = documents.settings
        self._in_force = documents
        self._path = path

    def __call__(self) -> bool:
        """Return whether the autoscaler should reload the documents at `path`."""
        options = self._options
        try:
            documents = gather_documents(
                options.models, options.configs, options.state, contain=True, in_force=self._in_force
            )
            check_serve_options(options, documents)
            replace_file(self._path, to_yaml(documents).encode())
        except Exception as error:  # noqa: BLE001  a faulty file must not terminate running requests; the error is logged
            reraise_memory_error(error)
            message = error.message if isinstance(error, click.UsageError) else f"{self._path}: {_reason(error)}"
            problem = f"{message}; the last valid documents stay in force"
            write_stderr(problem)
            note_problem(self._path, problem)
            return False
        self._in_force = documents
        note_problem(self._path, "")
        report_undecoded(documents)
        models, tenants = format_count(len(documents.models), "model"), format_count(len(documents.tenants), "tenant")
        write_stderr(f"documents reloaded: {models}, {tenants}")
        for key in ("limits", "devices", "tls", "weights"):
            if getattr(documents.settings, key) != getattr(self._begun, key):
                write_stderr(f"Settings: {key}: the change takes effect at the next start of `serve`")
        return True


def _reason(error: Exception) -> str:
    """Return why documents cannot be read. Any error other than OSError is a bug in Pilotlight to be reported."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"internal error ({type(error).__name__}); please report it"
