"""Engines that a container runtime starts by a command such as `docker run -p {port}:8080 IMAGE`. I/O.

Our process is the client in the foreground. The container, and with Docker also the listener on its port, belong to a
daemon. The command gets a label with the mark of the replica; a running container with it identifies the engine.
The client forwards SIGTERM to the container. Containers that remain after its end are removed by their label.

Docker's manual: "Filtering (--filter)" of `docker ps`, and `--sig-proxy` of `docker run`, which is on by default.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from autoscaler.drivers.local.replica_processes import MARK

RUNTIMES = frozenset({"docker", "podman", "nerdctl"})
"""Programs with Docker's command line."""
LABEL = "dev.pilotlight.replica"
DESTINATION = ("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST", "CONTAINERD_ADDRESS")
"""Variables that select the daemon; later commands need them, too."""
COMMAND_S = 60.0
"""Maximum time of a command about existing containers; a busy daemon stops a container within ten seconds."""
FAILED_PAUSE_S, FAILED_MAX = 1.0, 60
"""Pause after a failed removal, and the number of failures after which the removal is reported."""


class ContainerRun(NamedTuple):
    """A command that runs a container."""

    client: tuple[str, ...]
    """The words before `run` (or `container run`), for example `sudo docker --context gpu`."""
    options: tuple[str, ...]
    """The words after `run`: options, image and arguments."""


class RuntimeFailedError(Exception):
    """A command of the container runtime failed. `str()` is one line."""


def read_container_run(argv: Sequence[str]) -> ContainerRun | None:
    """Read a command; None if it does not run a container. `compose` has other options and is not read."""
    at = next((i for i, word in enumerate(argv) if PurePath(word).name in RUNTIMES), None)
    if at is None or "run" not in argv[at:]:
        return None
    run = argv.index("run", at)
    if "compose" in argv[at:run]:
        return None
    client = argv[: run - 1] if argv[run - 1] == "container" else argv[:run]
    return ContainerRun(tuple(client), tuple(argv[run + 1 :]))


def label_command(run: ContainerRun, mark: str, env: Iterable[str]) -> tuple[str, ...]:
    """Return the command with the label, which passes the variables named in `env` to the container."""
    passed = tuple(word for name in sorted({*env, MARK} - {*DESTINATION}) for word in ("--env", name))
    return (*run.client, "run", "--label", f"{LABEL}={mark}", *passed, *run.options)


def with_destination(client: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the client for later commands, which have no `env` of the Model."""
    chosen = [f"{name}={env[name]}" for name in DESTINATION if name in env]
    return ("env", *chosen, *client) if chosen else tuple(client)


def describe_status(how: str) -> str:
    """Name the signal of an exit status above 128, with which a client reports the signal that ended its container."""
    status = how.removeprefix("exited with status ")
    if not status.isdecimal() or int(status) <= 128:
        return how
    try:
        return f"{how} ({signal.Signals(int(status) - 128).name})"
    except ValueError:
        return how


async def list_containers(client: Sequence[str], mark: str, *, running: bool = False) -> tuple[str, ...]:
    """Return the ids of the replica's containers. `running`: only of running ones. Raises RuntimeFailedError."""
    shown = await _command(
        (*client, "ps", *(() if running else ("--all",)), "--quiet", "--no-trunc", "--filter", f"label={LABEL}={mark}")
    )
    return tuple(shown.split())


async def remove_containers(client: Sequence[str], mark: str, alarm: Callable[[str], None]) -> None:
    """Remove the replica's containers, and retry until none is left. `alarm` receives the reason, once a minute."""
    failed = 0
    while True:
        try:
            left = await list_containers(client, mark)
            if not left:
                return
            await _command((*client, "rm", "--force", "--volumes", *left))
        except RuntimeFailedError as error:
            failed += 1
            if failed % FAILED_MAX == 0:
                alarm(f"its container is not removed: {error}")
            await asyncio.sleep(FAILED_PAUSE_S)


async def _command(words: Sequence[str]) -> str:
    """Run a command and return its output. Raises RuntimeFailedError."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise RuntimeFailedError(f"{words[0]}: {error.strerror}") from None
    try:
        async with asyncio.timeout(COMMAND_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise RuntimeFailedError(f"{words[0]} did not end within {COMMAND_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").splitlines() or [f"exited with status {process.returncode}"]
        raise RuntimeFailedError(f"{words[0]}: {lines[-1][:200]}")
    return output.decode(errors="replace")
