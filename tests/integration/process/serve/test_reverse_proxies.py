"""The configurations on the pages about nginx, HAProxy and Caddy, in front of a real `serve`.

A test replaces only what a reader replaces (certificate, addresses, ports). It adds what surrounds the configuration:
the main file of nginx, the section `global` of HAProxy, and Caddy's own authority in place of a public one.
"""

from __future__ import annotations

import http.client
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from loadtest.cli import request_body
from tests.support.harness.serve.serve import Serving, fake, serving, settings, transcript
from tests.support.how_to import code_blocks
from tests.support.net.certificates import OURS, leaf, write, write_authority
from tests.support.net.default_proxies import GATEWAY, HAPROXY_AROUND, NGINX_AROUND
from tests.support.net.origin_client import STARTS_S_MAX, program, running_proxy
from tests.support.net.ports import free_port
from tests.support.waiting import until

HOST = "llm.example.com"
LARGE_BYTES = 2 << 20
"""More than the default limit of nginx, 1 MB."""
TIMEOUT_S = 60.0


class Documented(NamedTuple):
    """How the configuration of a page becomes that of a test."""

    language: str
    replaced: tuple[tuple[str, str], ...]
    around: str
    """CONFIGURATION stands for that of the page."""
    authority: str
    """The file with the authority of the certificate, in the folder of the test."""


PAGES = {
    "nginx": Documented(
        "nginx",
        (
            ("listen 443 ssl", "listen 127.0.0.1:PORT ssl"),
            ("/etc/nginx/tls/llm.example.com.crt", "FOLDER/edge.pem"),
            ("/etc/nginx/tls/llm.example.com.key", "FOLDER/edge.key"),
        ),
        NGINX_AROUND,
        f"ca-{OURS}.pem",
    ),
    "haproxy": Documented(
        "haproxy",
        (
            ("bind :443 ssl", "bind 127.0.0.1:PORT ssl"),
            ("/etc/haproxy/tls/llm.example.com.pem", "FOLDER/certificate-and-key.pem"),
        ),
        HAPROXY_AROUND,
        f"ca-{OURS}.pem",
    ),
    "caddy": Documented(
        "caddyfile",
        (),
        """{
	admin off
	local_certs
	skip_install_trust
	auto_https disable_redirects
	https_port PORT
	default_bind 127.0.0.1
	storage file_system FOLDER/storage
}
CONFIGURATION""",
        "storage/pki/authorities/local/root.crt",
    ),
}


class Entry(NamedTuple):
    """A running proxy."""

    port: int
    authority: Path

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection to the proxy by its public name, over TLS."""
        context = ssl.create_default_context(cafile=str(self.authority))
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_S)
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        connection.sock = context.wrap_socket(plain, server_hostname=HOST)
        return connection

    def get_status(self, path: str) -> int:
        """Return the status of a GET."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def post_chat(self, model: str, *, stream: bool, prompt_bytes: int = 30) -> http.client.HTTPConnection:
        """Send a chat request; return its connection without waiting for a response."""
        connection = self.connect()
        body = request_body(model, 100, prompt_bytes, stream=stream)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return connection


def configuration(name: str, folder: Path, port: int, origin: int) -> str:
    """Return the configuration of a page, with the addresses and files of a test."""
    page = PAGES[name]
    text = code_blocks(f"proxies-{name}.md", page.language)[0]
    for documented, used in ((GATEWAY, f"127.0.0.1:{origin}"), *page.replaced):
        assert text.count(documented) == 1, f"{documented} is not once on the page"
        text = text.replace(documented, used)
    around = page.around.replace("CONFIGURATION", text)
    return around.replace("FOLDER", str(folder)).replace("PORT", str(port))


@contextmanager
def in_front(name: str, folder: Path, origin: int) -> Iterator[Entry]:
    """Run a proxy with the configuration of its page until it responds."""
    pair = write(folder, "edge", leaf(OURS, HOST))
    (folder / "certificate-and-key.pem").write_bytes(pair.cert.read_bytes() + pair.key.read_bytes())
    write_authority(folder, OURS)
    entry = Entry(free_port(), folder / PAGES[name].authority)
    with running_proxy(name, folder, configuration(name, folder, entry.port, origin)) as process:
        wait_for_response(entry, process)
        yield entry


def wait_for_response(entry: Entry, process: subprocess.Popen[bytes]) -> None:
    """Wait until the proxy responds, with any status."""
    deadline_s, last = time.monotonic() + STARTS_S_MAX, "nothing"
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            entry.get_status("/health")
        except (OSError, http.client.HTTPException) as error:  # it does not listen, or has no certificate yet
            last = repr(error)
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"the proxy does not respond: {last}")


def disconnect(connection: http.client.HTTPConnection) -> None:
    """Close the connection as a client that ends; a response that is still open does not delay it."""
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


async def is_cancelled(folder: Path, model: str) -> bool:
    """Wait until the Model's engine has recorded its only request; return whether the client abandoned it."""
    (call,) = await until("the engine records the request", partial(transcript, folder, model))
    return call.aborted


def runs_one(serve: Serving, model: str) -> bool:
    return serve.demand(model)["running"] == 1


@pytest.mark.parametrize("name", PAGES)
async def test_documented_proxies_forward_host_large_body_stream_and_disconnect(tmp_path: Path, name: str) -> None:
    if program(name) is None:
        pytest.skip(f"{name} is not installed")
    (text,) = code_blocks(f"proxies-{name}.md", "yaml")
    models = [
        fake(tmp_path, "ada"),
        fake(tmp_path, "bob", "--tokens-per-s", "0", "--fail", "hangs-after-first-byte"),
        fake(tmp_path, "cid", "--fail", "hangs-before-first-byte"),
    ]
    async with serving(tmp_path / "s", *models, settings("200Mi")) as serve:
        with in_front(name, tmp_path, int(serve.url.rpartition(":")[2])) as entry:
            assert entry.get_status("/v1/models") == 421, "the proxy passes on the public name"
            serve.config.write_text(yaml.safe_dump_all([*models, settings("200Mi", **yaml.safe_load(text))]))
            assert serve.process is not None
            serve.process.send_signal(signal.SIGHUP)
            await until("the name is allowed", lambda: entry.get_status("/v1/models") == 200)

            connection = entry.post_chat("ada", stream=False, prompt_bytes=LARGE_BYTES)
            assert connection.getresponse().status == 200, "a large body is accepted"
            connection.close()

            connection = entry.post_chat("bob", stream=True)
            response = connection.getresponse()
            assert response.status == 200
            assert b"data: " in response.read1(), "the beginning of a stream arrives before its end"
            disconnect(connection)
            assert await is_cancelled(tmp_path, "bob")

            connection = entry.post_chat("cid", stream=False)
            await until("the engine has the request", partial(runs_one, serve, "cid"))
            disconnect(connection)
            assert await is_cancelled(tmp_path, "cid")
