"""Request policies under `serve`: from the documents to the engine, and a reload that leaves engines running."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.harness.serve.serve import Document, Serving, fake, serving, settings
from tests.support.waiting import until

SECRET = "the-secret-prompt"


class Rejecting(BaseHTTPRequestHandler):
    """The server of a check, which rejects everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"allow":false,"reason":"no poems"}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Write no log."""


@contextmanager
def check_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rejecting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/check"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chat(serve: Serving, **members: object) -> tuple[int, dict[str, Any]]:
    body = {"model": "ada", "messages": [{"role": "user", "content": SECRET}], **members}
    request = urllib.request.Request(f"{serve.url}/v1/chat/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def reload(serve: Serving, *documents: Document) -> None:
    serve.config.write_text(yaml.safe_dump_all(documents))
    assert serve.process is not None
    serve.process.send_signal(signal.SIGHUP)


@pytest.mark.standard
async def test_reload_changes_the_request_policy_without_an_engine_restart(tmp_path: Path) -> None:
    def tokens(serve: Serving) -> int:
        status, answer = chat(serve, max_completion_tokens=9)
        assert status == 200
        return int(answer["usage"]["completion_tokens"])

    with check_server() as url:
        async with serving(tmp_path / "s", fake(tmp_path, "ada", policy={"caps": {"max_tokens": 3}})) as serve:
            await serve.call("ada", tokens=1)
            engines = serve.engines("ada")
            assert tokens(serve) == 3
            reload(serve, fake(tmp_path, "ada", policy={"caps": {"max_tokens": 5}}), settings())
            await until("the new cap applies", lambda: tokens(serve) == 5)
            checked = fake(tmp_path, "ada", policy={"requestCheck": {"url": url}})
            reload(serve, checked, settings())
            await until("the check on loopback is not allowed", lambda: chat(serve)[0] == 503)
            assert chat(serve)[1]["error"]["code"] == "check_failed"
            reload(serve, checked, settings(checks={"hosts": ["127.0.0.1"]}))
            await until("the check rejects the request", lambda: chat(serve)[0] == 403)
            error = chat(serve)[1]["error"]
            assert (error["code"], "no poems" in error["message"]) == ("request_rejected", True)
            assert serve.engines("ada") == engines, "a policy restarts no engine"
            found = partial(str.__contains__, serve.output())
            assert found("event=check_failed")
            assert not found(SECRET)
