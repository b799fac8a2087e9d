"""A container runtime whose daemon owns published ports and containers, as Docker's, on a Unix socket.

`install_client(folder)` writes the program `docker`; `python -m tests.support.fakes.container_runtime SOCKET` is the
daemon. The program `docker-compose` is the same. A container is a process outside of the client's session, without the
mark in its environment, which listens on a port of its own; the daemon forwards the published port to it. `run`, also
of compose (options `-l` or `--label`, `-e`, `--publish`; the image or service is one word), `ps` with `--all` and a
filter on the label, `kill`, and `rm --force` are supported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

from tests.support.net.ports import free_port

CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({socket!r})
def send(value): connection.sendall(json.dumps(value).encode() + b"\\n")
signal.signal(signal.SIGTERM, lambda *_: send(["kill", signal.SIGTERM]))
send([sys.argv[1:], dict(os.environ)])
with connection.makefile() as answers:
    for line in answers:
        status, text = json.loads(line)
        print(text, end="", file=sys.stderr if status else sys.stdout)
        sys.exit(status)
sys.exit("the daemon has ended")
"""


class Container(NamedTuple):
    labels: set[str]
    """`NAME=VALUE`; of several with a name, the last."""
    process: asyncio.subprocess.Process
    server: asyncio.Server


class Daemon:
    """The daemon of one socket."""

    def __init__(self) -> None:
        self._containers: dict[str, Container] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, path: str) -> None:
        """Serve until cancelled, then kill all containers."""
        server = await asyncio.start_unix_server(self._client, path)
        print("listening", flush=True)
        try:
            await server.serve_forever()
        finally:
            for one in self._containers.values():
                with contextlib.suppress(ProcessLookupError):
                    one.process.kill()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (command, *words), env = json.loads(await reader.readline())
        if command == "compose" or command.startswith("-"):
            command, words = "run", words[words.index("run") + 1 :]
        if command == "run":
            answer = await self._run(words, env, reader)
        elif command == "ps":
            answer = 0, "".join(f"{id}\n" for id in self._filtered(words))
        else:
            answer = await self._kill([word for word in words if not word.startswith("-")], removed=command == "rm")
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _run(self, words: list[str], client_env: dict[str, str], reader: asyncio.StreamReader) -> tuple[int, str]:
        options: dict[str, list[str]] = {"-l": [], "-e": [], "--publish": []}
        options["--label"] = options["-l"]
        while words[0] in options:
            name, value, *words = words
            options[name].append(value)
        outer, inner = options["--publish"][0].split(":")
        port = free_port()
        argv = [word.replace(inner, str(port)) for word in words[1:]]
        env = {name: client_env[name] for name in options["-e"] if name in client_env}
        try:
            process = await asyncio.create_subprocess_exec(*argv, env=env, start_new_session=True)
        except OSError as error:
            return 127, f"docker: {argv[0]}: {error.strerror}\n"
        server = await asyncio.start_server(lambda r, w: self._forward(r, w, port), "127.0.0.1", int(outer))
        id = f"{len(self._containers):064x}"
        self._containers[id] = Container(
            {*{one.partition("=")[0]: one for one in options["--label"]}.values()}, process, server
        )
        self._tasks.add(signals := asyncio.create_task(self._signals(process, reader)))
        status = await process.wait()
        signals.cancel()
        server.close()
        return status if status >= 0 else 128 - status, ""

    @staticmethod
    async def _signals(process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            process.send_signal(json.loads(line)[1])

    @staticmethod
    async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.write_eof()

        with contextlib.suppress(OSError):
            inner, outer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(copy(reader, outer), copy(inner, writer))
            outer.close()
        writer.close()

    def _filtered(self, words: list[str]) -> Iterator[str]:
        for id, one in self._containers.items():
            runs = one.process.returncode is None
            wanted = {word.removeprefix("label=") for word in words if word.startswith("label=")}
            if wanted <= one.labels and (runs or "--all" in words):
                yield id

    async def _kill(self, ids: list[str], *, removed: bool) -> tuple[int, str]:
        for id in ids:
            one = self._containers.get(id)
            if one is None:
                return 1, f"Error: No such container: {id}\n"
            if one.process.returncode is None:
                one.process.kill()
                await one.process.wait()
            if removed:
                del self._containers[id]
        return 0, ""


@contextmanager
def fake_runtime(folder: Path) -> Iterator[Path]:
    """Runs the daemon; yields the client program, named `docker`, next to `docker-compose`."""
    path, program = folder / "daemon.sock", folder / "docker"
    (folder / "docker-compose").symlink_to(program)
    program.write_text(CLIENT.format(python=Path(sys.executable).resolve(), socket=str(path)))
    program.chmod(0o755)
    with Popen([sys.executable, "-m", "tests.support.fakes.container_runtime", str(path)], stdout=PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"listening\n"
            yield program
        finally:
            daemon.terminate()


async def main(path: str) -> None:
    """Serves until SIGTERM."""
    task: asyncio.Task[Any] = asyncio.ensure_future(Daemon().serve(path))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


if __name__ == "__main__":
    os.umask(0o077)
    asyncio.run(main(sys.argv[1]))
