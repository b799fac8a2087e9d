"""Case 43: Pilotlight never fetches, opens, resolves or connects to anything that a client names.

A canary server counts connections while requests that reference it in every possible field pass through a real `serve`.
Values that would redirect a request are rejected; all other values are text and reach the engine unchanged.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import psutil
import pytest

from gateway.request.forbidden_fields import PLACES
from tests.support.fakes.engines import echo_engine
from tests.support.harness.gateway.gateway_rig import Client
from tests.support.harness.serve.serve import Serving, model, serving, settings
from tests.support.net.canary import CanaryServer, canary_server, connected, request

SECRET = b"what-only-this-file-says"
BOUNDARY = "canary-boundary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TRANSCRIPTIONS, IMAGES = "/v1/audio/transcriptions", "/v1/images/edits"

Json = dict[str, object]


class Cage(NamedTuple):
    """A `serve` with one engine that records its requests, and a canary server."""

    one: Serving
    canary: CanaryServer
    file: Path
    """A second canary: its content must not appear anywhere."""
    kept: Path
    client: Client

    def baits(self) -> list[str]:
        """Every URL, path and address that could trigger a lookup."""
        port = self.canary.port
        return [
            f"http://127.0.0.1:{port}/bait.png", f"http://localhost:{port}/", f"HTTP://LOCALHOST:{port}/A?b=c#d",
            f"http://user:word@127.0.0.1:{port}/", f"http://[::ffff:127.0.0.1]:{port}/", f"http://2130706433:{port}/",
            f"http://0x7f.1:{port}/", f"http://127.0.0.1.rebind.invalid:{port}/", f"//127.0.0.1:{port}/x",
            f"127.0.0.1:{port}", f"https://127.0.0.1:{port}/", f"ftp://127.0.0.1:{port}/", f"gopher://127.0.0.1:{port}/",
            f"ws://127.0.0.1:{port}/", f"s3://127.0.0.1:{port}/b", "http://169.254.169.254/latest/meta-data/",
            "http://[fd00:ec2::254]/latest/", "http://metadata.google.internal/computeMetadata/v1/",
            "file:///etc/passwd", f"file://{self.file}", f"file://localhost{self.file}", str(self.file), "~/.netrc",
            "../../../../etc/passwd", f"@{self.file}", f"\\\\127.0.0.1@{port}\\share", "hf://canary/canary@main",
            "data:text/plain;base64,Y2FuYXJ5", "unix:/run/docker.sock", "$(id)", "{{ 7*7 }}", f"${{jndi:ldap://[::1]:{port}/}}",
        ]  # fmt: skip

    def asked(self) -> list[echo_engine.Seen]:
        """Return the requests that the engine received."""
        return echo_engine.seen(self.kept)


@asynccontextmanager
async def cage(tmp_path: Path) -> AsyncIterator[Cage]:
    """Start the cage; on exit, assert that neither canary was accessed."""
    file, kept = tmp_path / "canary.txt", tmp_path / "kept.jsonl"
    file.write_bytes(SECRET)
    engine = model("tiny", engine="command", command=echo_engine.command(kept))
    pages = settings(cors={"origins": ["*"]})  # otherwise the host check rejects a request with Origin
    async with canary_server() as canary, serving(tmp_path, engine, pages, options=("--gateways", "2")) as one:
        client = await connected(one.url)
        try:
            yield Cage(one, canary, file, kept, client)
        finally:
            client.leave()
        assert canary.connections == 0
        assert not strangers(one)
        assert SECRET not in b"".join(call.head + call.body for call in echo_engine.seen(kept))
        assert SECRET.decode() not in one.output()


def strangers(one: Serving) -> list[object]:
    """Return our processes' connections, half-open ones included, to peers other than engines and connected clients."""
    engines = {record.port for record in one.records()}
    own = {int(url.rpartition(":")[2]) for url in (one.url, one.ops)}
    pids = [one.autoscaler(), *one.gateways().values()]
    return [
        found
        for pid in pids
        for found in psutil.Process(pid).net_connections("inet")
        if found.raddr and found.laddr.port not in own and found.raddr.port not in engines
    ]


async def passed(cage: Cage, path: str, body: bytes, kind: str = "application/json") -> None:
    """Assert that the engine receives exactly these bytes and returns them to the client."""
    before = len(cage.asked())
    cage.client.send(request(path, body, kind=kind))
    status, _, answer = await cage.client.answer()
    assert (status, answer) == (200, body)
    seen = cage.asked()[before:]
    assert [(call.path, call.body) for call in seen] == [(path, body)]


async def refused(cage: Cage, sent: bytes, status: int, code: str) -> Json:
    """Assert one clear error that never reaches the engine; return the `error` object."""
    before = len(cage.asked())
    cage.client.send(sent)
    got, _, answer = await cage.client.answer()
    error = json.loads(answer)["error"]
    assert (got, error["code"]) == (status, code), sent
    assert len(cage.asked()) == before
    assert str(cage.canary.port).encode() not in answer, "an error that echoes its input"
    return dict(error)


def chats(bait: str) -> Iterator[Json]:
    """Yield chat completion bodies with the bait in every field that can name a resource."""
    parts: list[Json] = [
        {"type": "image_url", "image_url": {"url": bait, "detail": "high"}},
        {"type": "image_url", "image_url": bait},
        {"type": "input_audio", "input_audio": {"data": bait, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": bait}},
        {"type": "file", "file": {"file_id": bait, "filename": bait, "file_data": bait}},
        {"type": "text", "text": bait, "api_base": bait, "base_url": bait, "lora_path": bait},
    ]
    tools: list[Json] = [
        {"type": "mcp", "server_url": bait, "headers": {"Host": bait}},
        {"type": bait, "api_base": bait},
    ]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$schema": bait, "$ref": bait}}}
    yield {"messages": [{"role": "user", "content": parts}]}
    yield {"messages": [{"role": "user", "content": bait}], "tools": tools, "response_format": schema}
    yield {
        "messages": [], "file": bait, "image_url": bait, "url": bait, "user": bait, "metadata": {"api_base": bait},
        "webhook": bait, "callback_url": bait, "proxy": bait, "extra_body": {"api_base": bait, "lora_path": bait},
        "previous_response_id": bait, "chat_template": bait, "adapter": bait, "audio": {"voice": bait},
    }  # fmt: skip


def messages(bait: str) -> Json:
    """Build the same body in Anthropic's format."""
    source = {"type": "url", "url": bait}
    parts = [{"type": kind, "source": source} for kind in ("image", "document")]
    result = {"type": "tool_result", "tool_use_id": bait, "content": [{"type": "image", "source": source}]}
    return {
        "max_tokens": 5, "messages": [{"role": "user", "content": [*parts, result]}],
        "system": [{"type": "text", "text": bait, "base_url": bait}], "metadata": {"user_id": bait},
        "mcp_servers": [{"type": "url", "url": bait, "name": "x"}], "container": bait,
    }  # fmt: skip


def form(*parts: tuple[str, str]) -> bytes:
    """Build a form: the model, then one part per (name with further disposition parameters, value) pair."""
    lines = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}\r\n\r\n{value}\r\n'
        for name, value in (('model"', "tiny"), *parts)
    ]
    return f"{''.join(lines)}--{BOUNDARY}--\r\n".encode()


@pytest.mark.case("43")
@pytest.mark.standard
async def test_urls_in_request_bodies_reach_the_engine_as_text_only(tmp_path: Path) -> None:
    """Covers OpenAI's chat, completions, embeddings and responses, and Anthropic's messages."""
    async with cage(tmp_path) as one:
        for bait in one.baits():
            bodies = [(CHAT, chat) for chat in chats(bait)]
            bodies += [
                ("/v1/completions", {"prompt": [bait], "suffix": bait}),
                ("/v1/embeddings", {"input": [bait]}),
                (RESPONSES, {"input": [{"type": "input_image", "image_url": bait}, {"file_url": bait}]}),
                (MESSAGES, messages(bait)),
            ]  # fmt: skip
            for path, body in bodies:
                await passed(one, path, json.dumps({"model": "tiny", **body}).encode())


@pytest.mark.case("43")
async def test_urls_in_streamed_requests_and_forms_reach_the_engine_as_text(tmp_path: Path) -> None:
    async with cage(tmp_path) as one:
        for bait in one.baits():
            (chat, *_) = chats(bait)
            one.client.send(request(CHAT, json.dumps({"model": "tiny", "stream": True, **chat}).encode()))
            assert (await one.client.answer())[0] == 200
            sent = json.loads(one.asked()[-1].body)
            assert sent == {"model": "tiny", "stream": True, **chat}, "an engine that may not know stream_options"
            quoted = bait.replace("\\", "\\\\")
            await passed(
                one,
                TRANSCRIPTIONS,
                form((f'file"; filename="{quoted}"', bait), ('prompt"', bait), ('url"', bait)),
                FORM,
            )
            await passed(one, IMAGES, form((f'image[]"; filename="{quoted}"', bait), ('image_url"', bait)), FORM)


@pytest.mark.case("43")
async def test_body_fields_that_name_a_remote_host_are_rejected_with_400(tmp_path: Path) -> None:
    async with cage(tmp_path) as one:
        bait = one.baits()[0]
        for name in sorted(PLACES):
            for path in (CHAT, "/v1/embeddings", RESPONSES, MESSAGES, "/openai/deployments/tiny/chat/completions"):
                for value in (bait, None, {"remote_host": bait}):
                    body = json.dumps({"model": "tiny", "messages": [], name: value}).encode()
                    error = await refused(one, request(path, body), 400, "invalid_request")
                    assert (error["param"], name in str(error["message"])) == (name, True)
            for path in (TRANSCRIPTIONS, IMAGES):
                sent = request(path, form((f'{name}"', bait)), kind=FORM)
                assert (await refused(one, sent, 400, "invalid_request"))["param"] == name


@pytest.mark.case("43")
async def test_model_names_that_look_like_urls_are_rejected_with_404(tmp_path: Path) -> None:
    async with cage(tmp_path) as one:
        for bait in one.baits():
            body = json.dumps({"model": bait, "messages": []}).encode()
            for path in (CHAT, MESSAGES, "/v1/embeddings"):
                await refused(one, request(path, body), 404, "model_not_found")
            await refused(
                one, request(TRANSCRIPTIONS, form().replace(b"tiny", bait.encode()), kind=FORM), 404, "model_not_found"
            )
            await refused(one, request(CHAT, b'{"messages":[]}', f"X-Model: {bait}"), 404, "model_not_found")
            for path in ("/v1/models/{}", "/openai/deployments/{}/chat/completions"):
                method = "GET" if path.startswith("/v1/models") else "POST"
                one.client.send(request(path.format(quote(bait, safe="")), b'{"messages":[]}', method=method))
                assert (await one.client.answer())[0] == 404
            joined = json.dumps({"model": f"tiny:{bait}", "messages": []}).encode()
            await refused(one, request(CHAT, joined), 404, "model_not_found")


POINTERS = (
    "Forwarded: host={}", "X-Forwarded-Host: {}", "X-Original-URL: http://{}/", "X-Host: {}", "Referer: http://{}/",
    "Origin: http://{}", "Destination: http://{}/", "X-Api-Base: http://{}/", "Proxy: {}",
    "OpenAI-Organization: http://{}/",
)  # fmt: skip


@pytest.mark.case("43")
async def test_hostname_in_a_header_or_redirect_causes_no_request_to_that_host(tmp_path: Path) -> None:
    async with cage(tmp_path) as one:
        address = f"127.0.0.1:{one.canary.port}"
        body = b'{"model":"tiny","messages":[]}'
        for line in POINTERS:
            one.client.send(request(CHAT, body, line.format(address), host=address))
            assert (await one.client.answer())[::2] == (200, body)
            assert address.encode() not in one.asked()[-1].head
        for target, method in ((f"http://{address}{CHAT}", "POST"), (address, "CONNECT"), (f"//{address}/", "GET")):
            client = await connected(one.one.url)
            client.send(request(target, method=method))
            assert (await client.head())[0] in (400, 404)
            client.leave()
        body = json.dumps({"model": "tiny", "user": "redirect", "messages": [f"http://{address}/"]}).encode()
        one.client.send(request(CHAT, body))
        status, fields, answer = await one.client.answer()
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_error")
        assert "location" not in fields


@pytest.mark.case("43")
async def test_client_cache_salt_is_removed_from_the_request_body(tmp_path: Path) -> None:
    """It is the only member that is removed; the text around it is unchanged."""
    async with cage(tmp_path) as one:
        for name in (b"cache_salt", b"cache\\u005fsalt"):
            one.client.send(request(CHAT, b'{"model":"tiny","%b":"canary","messages":[ {"cache_salt":"x"} ]}' % name))
            assert (await one.client.answer())[0] == 200
            assert one.asked()[-1].body == b'{"model":"tiny","messages":[ {"cache_salt":"x"} ]}'
