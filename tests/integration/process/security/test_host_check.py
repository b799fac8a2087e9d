"""The host check of a real `serve`: it accepts names of containers and proxies and rejects that of a web page."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path

import pytest
import yaml

from tests.support.harness.serve.serve import fake, serving, settings
from tests.support.net.origin_client import HAPROXY, NGINX, program, proxy
from tests.support.waiting import until

PASSED_ON = "proxy_set_header Host $http_host;"
NGINX_DEFAULT = NGINX.replace(PASSED_ON, "")
NGINX_UPSTREAM = NGINX_DEFAULT.replace(
    "server {{", "upstream llm_gateway {{ server 127.0.0.1:{origin}; }} server {{"
).replace("proxy_pass http://127.0.0.1:{origin};", "proxy_pass http://llm_gateway;")
CADDY = """{{
	admin off
	auto_https off
}}
:{port} {{
	bind 127.0.0.1
	reverse_proxy 127.0.0.1:{origin}
}}
"""
SERVED = [
    "localhost", "127.0.0.1:8080", "[::1]:8080", "host.docker.internal:8080", "gateway.docker.internal",
    "host.containers.internal", "pilotlight", "my_service:8080", "shop-pilotlight-1", "4f2a9c1d7e3b", "box.local",
]  # fmt: skip
EVIL, PUBLIC = "evil.example", "llm.example"


def asked(port: int, host: str, **headers: str) -> tuple[int, str]:
    """Return status and message of a GET /v1/models with this Host header."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/v1/models", headers={"Host": host, **headers})
        response = connection.getresponse()
        error = json.loads(response.read()).get("error", {})
        return response.status, error.get("message", "")
    finally:
        connection.close()


def port_of(url: str) -> int:
    """Return the port of a URL."""
    return int(url.rpartition(":")[2])


@pytest.mark.standard
async def test_unlisted_host_or_origin_is_rejected_until_settings_allow_it(tmp_path: Path) -> None:
    documents = [fake(tmp_path, "ada"), settings()]
    async with serving(tmp_path / "s", *documents) as serve:
        port = port_of(serve.url)
        assert {host: asked(port, host)[0] for host in SERVED} == dict.fromkeys(SERVED, 200)
        for host in (EVIL, PUBLIC, f"{PUBLIC}:{port}"):
            status, message = asked(port, host)
            assert (status, "add it to hosts in Settings" in message) == (421, True)
        for page in ({"Origin": f"https://{EVIL}"}, {"Sec-Fetch-Site": "cross-site"}):
            status, message = asked(port, "localhost", **page)
            assert (status, "cors.origins in Settings" in message) == (403, True)

        changed = settings(hosts=[PUBLIC], cors={"origins": [f"https://{PUBLIC}"]})
        serve.config.write_text(yaml.safe_dump_all([documents[0], changed]))
        assert serve.process is not None
        serve.process.send_signal(signal.SIGHUP)
        await until("the new name is served", lambda: asked(port, f"{PUBLIC}:{port}")[0] == 200)
        assert asked(port, PUBLIC, Origin=f"https://{PUBLIC}")[0] == 200
        assert asked(port, EVIL)[0] == 421

        keyed = settings(auth="keys")
        serve.config.write_text(yaml.safe_dump_all([documents[0], keyed]))
        serve.process.send_signal(signal.SIGHUP)
        await until("keys are needed", lambda: asked(port, "localhost")[0] == 401)
        assert asked(port, EVIL, Origin=f"https://{EVIL}")[0] == 401, "keys protect the port instead"


@pytest.mark.parametrize(
    ("name", "config", "passes_host"),
    [
        ("nginx", NGINX_DEFAULT, False),
        ("nginx", NGINX_UPSTREAM, False),
        ("nginx", NGINX, True),
        ("haproxy", HAPROXY, True),
        ("caddy", CADDY, True),
    ],
    ids=["nginx", "nginx-upstream", "nginx-passes-host", "haproxy", "caddy"],
)
async def test_requests_through_reverse_proxies_pass_the_host_check(
    tmp_path: Path, name: str, config: str, passes_host: bool
) -> None:
    """A proxy that forwards the client's Host needs its public name in `hosts`."""
    if program(name) is None:
        pytest.skip(f"{name} is not installed")
    given = settings(hosts=[PUBLIC])
    async with serving(tmp_path / "s", fake(tmp_path, "ada"), given) as serve:
        with proxy(name, tmp_path, port_of(serve.url), config, ready="/v1/models") as port:
            for host in (f"127.0.0.1:{port}", "localhost", PUBLIC):
                assert asked(port, host)[0] == 200
            assert asked(port, EVIL)[0] == (421 if passes_host else 200), "the others replace the name"
            for page in ({"Origin": f"http://{EVIL}"}, {"Sec-Fetch-Site": "cross-site"}):
                assert asked(port, "localhost", **page)[0] == 403
