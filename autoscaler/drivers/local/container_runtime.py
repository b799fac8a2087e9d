"""Engines that a container runtime starts by a command such as `docker run -p {port}:8080 IMAGE`, also through
`docker compose run SERVICE`. I/O.

Our process is the client in the foreground. The container, and with Docker also the listener on its port, belong to a
daemon. The command gets a label with the mark of the replica; a running container with it identifies the engine.
The client forwards SIGTERM to the container. Containers that remain after its end are removed by their label.

Docker's manual: "Filtering (--filter)" of `docker ps`, `--sig-proxy` of `docker run`, which is on by default, and
`docker compose run`. Of the options, only the short forms exist in all versions of compose.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from autoscaler.drivers.local.replica_processes import MARK
from autoscaler.spec.engine_definition import EngineError

RUNTIMES = frozenset({"docker", "podman", "nerdctl"})
"""Programs with Docker's command line."""
COMPOSE = frozenset({"docker-compose"})
"""Programs with the command line of `docker compose`. `docker` finds their containers."""
WRAPPERS = frozenset({"sudo", "env", "nice", "ionice", "nohup", "setsid", "timeout"})
"""Programs that start a runtime which follows their options, variables and numbers."""
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?[smhd]?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
VALUED = frozenset({"-u", "--user", "-g", "--group", "-s", "--signal", "-c", "--class"})
"""Options of wrappers whose value is the next word."""
FLAGS = frozenset({"-D", "--debug", "--tls", "--tlsverify", "-r", "--remote", "--debug-full", "--insecure-registry"})
"""Global options of runtimes without a value."""
PUBLISH, EVERYWHERE = re.compile("-[a-zA-Z]*p|--publish"), frozenset({"", "0.0.0.0", "[::]", "::"})  # noqa: S104  compared, not bound
"""The option for `[ADDRESS:]PORT:CONTAINER_PORT`, and addresses that mean all."""
CONTAINER_ID = re.compile(r"[0-9a-f]{12,64}")
LABEL = "dev.pilotlight.replica"
DESTINATION = ("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST", "CONTAINERD_ADDRESS")
"""Variables that select the daemon; later commands need them, too."""
COMMAND_S = 60.0
"""Maximum time of a command about existing containers; a busy daemon stops a container within ten seconds."""
OUTPUT_BYTES_MAX = 1 << 20
"""Maximum size of the output of such a command."""
FAILED_PAUSE_S, FAILED_MAX = 1.0, 60
"""Pause after a failed removal, and the number of failures after which the removal is reported."""


class ContainerRun(NamedTuple):
    """A command that runs a container."""

    client: tuple[str, ...]
    """The words for later commands about the container, for example `sudo docker --context gpu`."""
    command: tuple[str, ...]
    """The words up to `run`, for example `sudo docker --context gpu compose -f engines.yaml run`."""
    options: tuple[str, ...]
    """The words after `run`: options, image or service, and arguments."""


class RuntimeFailedError(Exception):
    """A command of the container runtime failed. `str()` is one line."""


def read_container_run(argv: Sequence[str]) -> ContainerRun | None:
    """Read a command; None if it does not run a container."""
    at = _find_program(argv, RUNTIMES | COMPOSE)
    if at is None:
        return None
    client = (*argv[:at], "docker") if PurePath(argv[at]).name in COMPOSE else ()
    may_be_value = False
    for position in range(at + 1, len(argv)):
        word = argv[position]
        if word == "run":
            return ContainerRun(
                client or tuple(argv[:position]), tuple(argv[: position + 1]), tuple(argv[position + 1 :])
            )
        if word in {"compose", "container"} and not may_be_value and not client:
            client = tuple(argv[:position])
            if word == "container" and tuple(argv[position + 1 : position + 2]) != ("run",):
                return None
            continue
        if not word.startswith("-") and not may_be_value:
            return None
        may_be_value = word.startswith("-") and "=" not in word and word not in FLAGS
    return None


def check_command(argv: Sequence[str]) -> None:
    """Raise EngineError if the processes that a command starts could not be managed."""
    if _find_program(argv, {"systemd-run"}) is not None and "--scope" not in argv:
        raise EngineError("spec.command: systemd-run starts a service that Pilotlight cannot stop; add --scope")
    if _find_program(argv, {"podman-compose"}) is not None:
        raise EngineError("spec.command: podman-compose adds no labels to containers; use podman or docker compose")


def _find_program(argv: Sequence[str], names: Collection[str]) -> int | None:
    """Return the position of one of these programs: the first word, or the command of wrappers."""
    for position, word in enumerate(argv):
        if PurePath(word).name in names:
            return position
        is_argument = position > 0 and (
            word.startswith("-") or VARIABLE.match(word) or NUMBER.fullmatch(word) or argv[position - 1] in VALUED
        )
        if PurePath(word).name not in WRAPPERS and not is_argument:
            return None
    return None


def publishes_to_network(run: ContainerRun) -> bool:
    """Whether a published port has no address, so that other hosts reach the engine without a key."""
    for option, value in zip(run.options, (*run.options[1:], ""), strict=True):
        name, _, written = option.partition("=")
        if option in {"-P", "--publish-all"}:
            return True
        if PUBLISH.fullmatch(name):
            published = written or value
        elif option.startswith("-p"):
            published = option[2:]
        else:
            continue
        address, _, ports = published.rpartition(":")[0].rpartition(":")
        if ports.replace("-", "").isdecimal() and address in EVERYWHERE:
            return True
    return False


def label_command(run: ContainerRun, mark: str, env: Iterable[str], devices: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command with the label. It passes the variables named in `env` to the container without showing their
    values to other users, and those of `devices` by value, because `sudo` removes them from its environment.
    """
    values = [f"{name}={value}" for name, value in {**devices, MARK: mark}.items()]
    passed = [word for one in sorted([*({*env} - {*DESTINATION}), *values]) for word in ("-e", one)]
    return (*run.command, "-l", f"{LABEL}={mark}", *passed, *run.options)


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
    found = tuple(shown.split())
    if not all(map(CONTAINER_ID.fullmatch, found)):
        raise RuntimeFailedError(f"{client[0]} ps wrote something else than ids of containers")
    return found


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
            output, errors, _ = await asyncio.gather(
                _read_limited(process.stdout), _read_limited(process.stderr), process.wait()
            )
    except TimeoutError:
        raise RuntimeFailedError(f"{words[0]} did not end within {COMMAND_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").splitlines() or [f"exited with status {process.returncode}"]
        raise RuntimeFailedError(f"{words[0]}: {lines[-1][:200]}")
    if len(output) > OUTPUT_BYTES_MAX:
        raise RuntimeFailedError(f"{words[0]} wrote more than {OUTPUT_BYTES_MAX >> 20} MiB")
    return output.decode(errors="replace")


async def _read_limited(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end, and return at most the first OUTPUT_BYTES_MAX + 1 bytes."""
    kept = bytearray()
    while stream is not None and (part := await stream.read(1 << 16)):
        kept += part[: OUTPUT_BYTES_MAX + 1 - len(kept)]
    return bytes(kept)
