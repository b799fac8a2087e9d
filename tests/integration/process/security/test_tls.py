"""TLS through a real `serve`: official clients, certificate rotation, engines with TLS, invalid files."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from autoscaler.drivers.local.state_directory import StateDirectory
from tests.support.fakes.engines import tls_engine
from tests.support.harness.serve.serve import Serving, fake, model, serving, settings
from tests.support.net.certificates import OURS, THEIRS, Pair, leaf, sides, write, write_authority
from tests.support.net.ports import free_port
from tests.support.waiting import until

ASK: Any = {"role": "user", "content": "Who is there?"}
REFUSED_S = 90.0
TIMEOUT_S = 600.0
"""Timeout of the official client. By default a connect may take 5 s; a busy machine may pause for longer."""


def secured(folder: Path) -> dict[str, str]:
    """Return the Settings key `tls` with files of our authority."""
    pair = write(folder, "edge", leaf(OURS))
    return {"certFile": str(pair.cert), "keyFile": str(pair.key)}


def address(one: Serving) -> tuple[str, int]:
    """Return the address of its inference port."""
    host, _, port = one.url.removeprefix("http://").partition(":")
    return host, int(port)


@asynccontextmanager
async def official(one: Serving, ca: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, which trusts one authority."""
    url = one.url.replace("http://", "https://")
    context = ssl.create_default_context(cafile=str(ca))
    async with (
        httpx2.AsyncClient(verify=context) as http,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none-needed", http_client=http, max_retries=0, timeout=TIMEOUT_S
        ) as client,
    ):
        yield client


async def shown(one: Serving) -> bytes:
    """Return the certificate that a new client receives, whatever its issuer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(*address(one), ssl=context)
    try:
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()


@pytest.mark.standard
async def test_tls_stream_of_the_openai_client_survives_certificate_rotation(tmp_path: Path) -> None:
    ca = write_authority(tmp_path, OURS)
    documents = [fake(tmp_path, "ada"), settings(tls=secured(tmp_path))]
    async with serving(tmp_path / "s", *documents, options=("--gateways", "2")) as one, official(one, ca) as client:
        assert f"ready on {one.url.replace('http', 'https')} " in one.output()
        api = client.chat.completions
        for _ in range(3):
            whole = await api.create(model="ada", messages=[ASK], max_tokens=5)
            assert whole.choices[0].message.content
            stream = await api.create(model="ada", messages=[ASK], max_tokens=5, stream=True)
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        with socket.create_connection(address(one)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            plain.settimeout(60)
            assert b"HTTP" not in plain.recv(100)

        running = await api.create(model="ada", messages=[ASK], max_tokens=400, stream=True)
        (tmp_path / "broken").write_text("broken")
        (tmp_path / "broken").replace(tmp_path / "edge.key")  # at once: a gateway could read an empty file
        await until("both gateways keep the old one", lambda: one.output().count("event=file_reload_failed") == 2)
        before = await shown(one)
        write(tmp_path, "edge", leaf(THEIRS))
        await until("both gateways have read the new one", lambda: one.output().count("event=file_reloaded") == 2)
        assert await shown(one) not in {before, b""}
        assert [chunk async for chunk in running][-1].choices[0].finish_reason, "old connections live on"
        assert "Traceback" not in one.output()
        _, writer = await asyncio.open_connection(*address(one), ssl=sides(THEIRS, THEIRS).client)
        assert await one.stop() == 0, "a client that keeps its connection holds up no stop"
        writer.transport.abort()


@pytest.mark.parametrize("trusted", [OURS, THEIRS])
async def test_engine_request_succeeds_only_with_a_trusted_certificate(tmp_path: Path, trusted: str) -> None:
    pair, ca = write(tmp_path, "engine", leaf(OURS, "engine.example")), write_authority(tmp_path, trusted)
    command = tls_engine.command(*pair)
    documents = [
        model("ada", engine="command", command=command, tls={"serverName": "engine.example"}),
        settings(tls={"caFile": str(ca)}),
    ]
    async with (
        serving(tmp_path / "s", *documents) as one,
        openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none-needed", max_retries=0, timeout=TIMEOUT_S) as client,
    ):
        api = client.chat.completions
        if trusted == OURS:
            stream = await api.create(model="ada", messages=[ASK], stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "abc"
        else:
            with pytest.raises(openai.InternalServerError) as error:
                await api.create(model="ada", messages=[ASK])
            assert (error.value.status_code, error.value.code) == (502, "upstream_error")
            assert one.output().count("event=engine_distrusted") == 1


def is_ready(operations: int) -> bool:
    """Return whether the gateway with this operations port knows the Models."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operations}/readyz", timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def let_in(port: int, ca: Path, pair: Pair | None) -> bool:
    """Return whether the contract endpoint accepts a caller with this certificate, or without one."""
    context = ssl.create_default_context(cafile=str(ca))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    try:  # with TLS 1.3 a rejected client learns so with its first response
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as one,
        ):
            one.sendall(b"GET /v1/routes HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return one.recv(12) not in (b"", b"HTTP/1.1 401")
    except (ssl.SSLError, ConnectionError):  # a reset, if the endpoint has closed before it read the request
        return False


@pytest.mark.parametrize("by", ["token", "certificate"])
@pytest.mark.standard
async def test_gateway_connects_to_an_autoscaler_over_tcp_with_tls(tmp_path: Path, by: str) -> None:
    """Both components started by hand, as on two machines, authenticated by a token or by a certificate each."""
    pair, ca = write(tmp_path, "scaler", leaf(OURS)), write_authority(tmp_path, OURS)
    mine, strange = write(tmp_path, "gateway", leaf(OURS)), write(tmp_path, "stranger", leaf(THEIRS))
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    asked, shown_by_us = (
        (["--token-file", token], ["--token-file", token])
        if by == "token"
        else (["--contract-ca-file", ca], ["--contract-cert-file", mine.cert, "--contract-key-file", mine.key])
    )
    async with serving(tmp_path / "s", fake(tmp_path, "ada"), start=False) as one:
        contract, operations, (_, listen) = free_port(), free_port(), address(one)
        StateDirectory.open(one.state).close()
        pilotlight = [sys.executable, "-m", "pilotlight"]
        scaler = [
            *pilotlight, "autoscaler", "--driver", "local", "--documents", one.config, "--state", one.state,
            "--contract-listen", f"127.0.0.1:{contract}", "--ops", one.ops.removeprefix("http://"), *asked,
            "--contract-cert-file", pair.cert, "--contract-key-file", pair.key,
        ]  # fmt: skip
        gateway = [
            *pilotlight, "gateway", "--autoscaler", f"https://127.0.0.1:{contract}", "--listen", f"127.0.0.1:{listen}",
            "--ops", f"127.0.0.1:{operations}", *shown_by_us, "--contract-ca-file", ca,
        ]  # fmt: skip
        with one.output_file.open("ab") as output:
            parts = [
                subprocess.Popen([str(word) for word in words], stdout=output, stderr=output)
                for words in (scaler, gateway)
            ]
        try:
            await until("the gateway is ready", lambda: is_ready(operations))  # it may start before the autoscaler
            assert (await one.call("ada")).status == 200
            results = [await asyncio.to_thread(let_in, contract, ca, shown) for shown in (None, strange, mine)]
            assert results == [False, False, by == "certificate"]
        finally:
            for part in reversed(parts):
                part.terminate()
            statuses = [part.wait(60) for part in reversed(parts)]
        assert statuses == [0, 0], one.output()


def refused(one: Serving) -> str:
    """Return the one output line of a `serve` that does not start, with exit status 2."""
    done = subprocess.run(one.argv, capture_output=True, text=True, timeout=REFUSED_S, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    return done.stderr.removeprefix("pilotlight: ").rstrip()


async def test_unusable_tls_files_fail_the_start_with_one_error_line(tmp_path: Path) -> None:
    tls = secured(tmp_path)
    other, removed = write(tmp_path, "other", leaf(THEIRS)), tmp_path / "gone.pem"
    for wrong, expected in (
        ({"keyFile": str(other.key)}, f"Settings: tls: {other.key}: this key does not belong to the certificate "),
        ({"certFile": str(removed)}, f"Settings: tls: {removed}: No such file or directory"),
        ({"caFile": str(tls["keyFile"])}, f"Settings: tls: {tls['keyFile']}: the file contains no usable PEM"),
        ({"caFile": "ca.pem"}, "caFile: expected an absolute path"),
    ):
        async with serving(tmp_path / "s", fake(tmp_path, "ada"), settings(tls=tls | wrong), start=False) as one:
            assert expected in refused(one)
    async with serving(tmp_path / "s", fake(tmp_path, "ada"), settings(tls={"certFile": "/a"}), start=False) as one:
        assert "tls.keyFile: missing; it is required with certFile" in refused(one)


async def test_tls_key_file_readable_by_other_users_logs_one_warning(tmp_path: Path) -> None:
    tls = secured(tmp_path)
    Path(tls["keyFile"]).chmod(0o644)
    async with serving(tmp_path / "s", fake(tmp_path, "ada"), settings(tls=tls), options=("--gateways", "2")) as one:
        assert one.output().count(f"{tls['keyFile']} can be read by other users of this machine: chmod 600") == 1
