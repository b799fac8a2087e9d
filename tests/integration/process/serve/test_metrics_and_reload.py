"""`serve` as users run it: metrics of all processes, reload of documents and keys, a terminal that closes."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.harness.serve.serve import Serving, fake, model, serving, settings, shot
from tests.support.net.ports import free_port
from tests.support.waiting import until

GATEWAY = {
    "pilotlight_calls", "pilotlight_calls_waiting", "pilotlight_calls_running", "pilotlight_queue_seconds",
    "pilotlight_first_byte_seconds", "pilotlight_overhead_seconds", "pilotlight_tokens",
    "pilotlight_routes_age_seconds", "pilotlight_upstream_retries",
}  # fmt: skip
AUTOSCALER = {
    "pilotlight_replicas", "pilotlight_start_seconds", "pilotlight_start_failures", "pilotlight_decision_seconds",
    "pilotlight_plan_seconds", "pilotlight_actions", "pilotlight_slice_memory_bytes", "pilotlight_leader",
}  # fmt: skip


def hang_up(serve: Serving) -> None:
    """Send SIGHUP to the supervisor."""
    assert serve.process is not None
    serve.process.send_signal(signal.SIGHUP)


def problem(serve: Serving) -> str:
    """Return why the documents in force are not the latest; empty if they are."""
    found = serve.get("/api/v1/documents")
    assert isinstance(found, dict)
    return str(found["problem"])


def asked(url: str, host: str | None = None) -> int:
    """Return the status of a GET with this Host header; 0 if there is no response.

    The limit detects a hang only: on a busy machine, a response may take seconds.
    """
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"Host": host} if host else {}), timeout=60
        ) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.standard
async def test_scrape_of_the_operations_port_returns_metrics_of_every_process(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", fake(tmp_path, "ada"), options=("--gateways", "2")) as serve:
        results = await serve.send(*(shot("ada") for _ in range(6)))
        assert all(result.code == "" for result in results)

        def is_complete() -> bool:
            """Return whether a scrape has every metric and all six requests. It omits a gateway that is slow."""
            with urllib.request.urlopen(f"{serve.ops}/metrics", timeout=60) as response:
                families = list(text_string_to_metric_families(response.read().decode()))
            samples = [sample for family in families for sample in family.samples]
            counts = {one.name: one.value for one in samples if one.labels.get("outcome") == "completed"}
            names = {family.name for family in families}
            return names >= GATEWAY | AUTOSCALER and counts.get("pilotlight_calls_total") == 6.0

        await until("there is every metric, and all six are counted, by whichever gateway", is_complete)


async def test_operations_port_rejects_a_foreign_host_header_with_421(tmp_path: Path) -> None:
    """DNS rebinding: the browser resolves evil.example to the loopback address and sends that name as Host."""
    port = f"http://127.0.0.1:{free_port()}"
    words = ["gateway", "--autoscaler", f"unix:{tmp_path}/none.sock", "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "pilotlight", *words, "--ops", port.removeprefix("http://")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as gateway:
        try:
            async with serving(tmp_path / "s", fake(tmp_path, "ada")) as serve:
                await until("the gateway's own port answers", lambda: asked(f"{port}/healthz") == 200)
                for ops in (serve.ops, port):
                    assert asked(f"{ops}/metrics", "localhost") == 200
                    assert asked(f"{ops}/metrics", "evil.example") == 421
        finally:
            gateway.kill()


@pytest.mark.standard
async def test_sighup_applies_valid_documents_and_keeps_them_after_invalid_ones(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", fake(tmp_path, "ada")) as serve:
        await serve.call("ada")
        engines = serve.engines("ada")
        both = [fake(tmp_path, "ada"), fake(tmp_path, "bob"), settings()]
        serve.config.write_text(yaml.safe_dump_all(both))
        hang_up(serve)
        await until(
            "clients may call it", lambda: "bob" in urllib.request.urlopen(f"{serve.url}/v1/models").read().decode()
        )
        assert serve.engines("ada") == engines, "what runs is not touched"

        serve.config.write_text(yaml.safe_dump_all([model("ada", engine="command", command="x {port}"), settings()]))
        hang_up(serve)
        await until("it logs the error", lambda: "the last valid documents stay in force" in serve.output())
        (line,) = [line for line in serve.output().splitlines() if "stay in force" in line]
        assert f"{serve.config}: Model ada: spec.command: expected" in line
        assert (await serve.call("bob")).code == ""
        assert f"{serve.config}: Model ada: spec.command: expected" in problem(serve)

        def rejected(count: int) -> bool:
            return serve.output().count("stay in force") == count

        for number, text in enumerate(("a: !!bool x", 'a: "\\ud800"', "a: &a [*a]", "a: !!map [1, 2]"), 2):
            serve.config.write_text(text)
            hang_up(serve)
            await until("the error is logged", partial(rejected, number))
        assert len(re.findall(rf"{serve.config}: document 1: (?:a: )?line 1: ", serve.output())) == 4
        assert (await serve.call("bob")).code == "", "nothing of it ends anything"
        await until("status names the last error", lambda: "its YAML type" in problem(serve))
        assert f"{serve.config}: document 1: a: line 1: " in problem(serve)
        serve.config.write_text(yaml.safe_dump_all(both))
        hang_up(serve)
        await until("no problem is left", lambda: problem(serve) == "")


@pytest.mark.standard
async def test_sighup_applies_an_api_key_added_to_the_state_directory(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", fake(tmp_path, "ada")) as serve:
        assert (await serve.call("ada")).code == ""
        command = [sys.executable, "-m", "pilotlight", "key", "new", "--tenant", "acme", "--state", str(serve.state)]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        assert serve.process is not None
        assert f"kill -HUP {serve.process.pid}" in made.stdout
        (key,) = [word for word in made.stdout.split() if word.startswith("pl-")]
        hang_up(serve)

        async with asyncio.timeout(60):
            while (await serve.call("ada")).status != 401:  # with a Tenant a key is required
                await asyncio.sleep(0.02)
        (result,) = await serve.send(shot("ada", headers=(("authorization", f"Bearer {key}"),)))
        assert result.code == ""


async def test_settings_that_need_a_restart_are_logged_on_reload(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", fake(tmp_path, "ada")) as serve:
        changed = settings(memory="200Mi", limits={"bodyBytesMax": "1Mi"})
        serve.config.write_text(yaml.safe_dump_all([fake(tmp_path, "ada"), changed]))
        hang_up(serve)
        when = "the change takes effect at the next start of `serve`"
        await until("it logs both", lambda: serve.output().count(when) == 2)
        assert f"Settings: limits: {when}" in serve.output()
        assert f"Settings: devices: {when}" in serve.output()


def keeps_hangups(serve: Serving) -> bool:
    """Return whether SIGHUP is blocked: from the start until the supervisor can reload.

    While a thread is created, the C library blocks all signals, also before that.
    """
    assert serve.process is not None
    found = re.search(r"SigBlk:\s+(\w+)", Path(f"/proc/{serve.process.pid}/status").read_text())
    blocked = int(found[1], 16) if found is not None else 0
    return bool(blocked & 1 << (signal.SIGHUP - 1)) and not blocked & 1 << (signal.SIGTERM - 1)


@pytest.mark.standard
async def test_sighup_during_the_start_stops_no_process(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", fake(tmp_path, "ada"), start=False) as serve:
        for number in range(1, 6):
            serve.begin_start()
            hung_up = False
            async with asyncio.timeout(120):
                while serve.output().count("ready on") < number:
                    if serve.output().count("starting with") == number or keeps_hangups(serve):
                        hang_up(serve)
                        hung_up = True
                    await asyncio.sleep(0.02)
            if hung_up:
                break
            await serve.stop()  # it was ready before the first check
        await until("it heard", lambda: "documents reloaded" in serve.output())
        assert "event=process_exited" not in serve.output()


def test_closed_terminal_stops_serve_and_all_children(tmp_path: Path) -> None:
    config = tmp_path / "d.yaml"
    config.write_text(yaml.safe_dump_all([fake(tmp_path, "ada"), settings()]))
    state = tempfile.mkdtemp(prefix="pilotlight-")
    words = ["serve", "-c", str(config), "--state", state, "--listen", "127.0.0.1:0", "--ops", "127.0.0.1:0"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "pilotlight", *words])  # noqa: S606  no shell is wanted
    supervisor, content = psutil.Process(pid), b""
    children: list[psutil.Process] = []
    try:
        while b"print(answer" not in content:
            content += os.read(terminal, 4096)
        children = supervisor.children(recursive=True)
        os.close(terminal)  # the kernel sends SIGHUP to the session leader, and /dev/tty is gone
        assert supervisor.wait(60) == 0
        assert children
        assert not any(child.is_running() for child in children)
    finally:
        for process in (*children, supervisor):
            if process.is_running():
                process.kill()
        shutil.rmtree(state)
