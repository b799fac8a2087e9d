"""The host check: which names can be registered, and which origins may send requests, as tables."""

from __future__ import annotations

import pytest

from gateway.http.host_check import HostCheck, host_name, is_loopback, is_on_loopback, is_registrable

LOCAL = [
    "localhost", "LOCALHOST:8080", "localhost.", "app.localhost", "127.0.0.1", "127.0.0.1:8080", "10.0.0.5:80",
    "0.0.0.0:8080", "8.8.8.8", "127.0.0.1.", "[::1]", "[::1]:8080", "[2001:DB8::1]:", "[::ffff:127.0.0.1]",
    # Docker and Podman
    "host.docker.internal", "Host.Docker.Internal:8080", "gateway.docker.internal", "host.containers.internal",
    # containers and Compose services
    "pilotlight", "pilotlight:8080", "llm_gateway", "shop-pilotlight-1", "b0f1a1c2d3e4",
    # home and cluster networks
    "nas.local", "nas.local.", "printer.home.arpa", "pilotlight.team-a.svc.cluster.local", "llm.corp.internal",
]  # fmt: skip
FOREIGN = [
    "evil.example", "EVIL.Example:8080", "evil.example.", "evil.example..", "localhost.evil.example",
    "127.0.0.1.evil.example", "127.0.0.1.nip.io", "local.example", "docker.internal.example", "evil-local.example",
    "evillocal.com", "evil.internal2", "home.arpa", "evil.arpa", "evil.local~", "evil.lan", "xn--e1awd7f.com", "127.1",
    "1.2.3.4.5", "[:]", "[1.2]", "evil%2eexample.com", "machine.tailnet.ts.net", "abc.trycloudflare.com",
]  # fmt: skip
MALFORMED = ["", ":80", "::1", "[::1", "::1]", "[fe80::1%25eth0]", "a:b", "a:123456", "a b", "a/", "u@a", "\u0131.com"]


@pytest.mark.parametrize("header", LOCAL)
def test_ip_address_or_unregistrable_host_name_is_allowed_by_default(header: str) -> None:
    name = host_name(header)
    assert name is not None
    assert not is_registrable(name)
    assert HostCheck((), ()).has_allowed_host(name)


@pytest.mark.parametrize("header", FOREIGN)
def test_public_host_name_that_is_not_configured_is_rejected(header: str) -> None:
    name = host_name(header)
    assert name is not None
    assert is_registrable(name)
    assert not HostCheck(("llm.example", "example"), ()).has_allowed_host(name)


@pytest.mark.parametrize("header", MALFORMED)
def test_malformed_host_header_yields_no_host_name(header: str) -> None:
    assert host_name(header) is None


@pytest.mark.parametrize("header", ["llm.example", "LLM.example:8080", "llm.example."])
@pytest.mark.parametrize("setting", ["llm.example", "Llm.Example", "llm.example."])
def test_configured_host_is_allowed_in_any_case_and_with_any_port(setting: str, header: str) -> None:
    name = host_name(header)
    assert HostCheck((setting,), ()).has_allowed_host(name)
    assert not HostCheck((setting,), ()).has_allowed_host(f"sub.{name}")


def test_request_without_host_header_passes_the_host_check() -> None:
    assert HostCheck((), ()).has_allowed_host(None)


APP, OTHER = "https://app.example", "https://evil.example"


@pytest.mark.parametrize(
    ("origins", "origin", "site", "allowed"),
    [
        ((), None, None, True),
        ((), None, "none", True),
        ((), None, "same-origin", True),
        ((), None, "same-site", True),
        ((), None, "cross-site", False),
        ((), None, "Cross-Site", False),
        ((), None, "none, cross-site", False),
        ((), OTHER, None, False),
        ((), OTHER, "same-origin", False),  # DNS rebinding behind a proxy that replaces Host
        ((), "null", None, False),
        ((), "", None, False),
        ((APP,), APP, None, True),
        ((APP,), APP, "cross-site", True),  # otherwise no page of an allowed origin could send requests
        ((APP,), OTHER, "cross-site", False),
        ((APP,), f"{APP}:8443", "cross-site", False),
        ((APP,), APP.upper(), "cross-site", False),
        ((APP,), None, "cross-site", False),
        (("*",), OTHER, "cross-site", True),
        (("*",), None, "cross-site", False),
    ],
)
def test_browser_origin_is_allowed_only_if_configured(
    origins: tuple[str, ...], origin: str | None, site: str | None, allowed: bool
) -> None:
    given = {b"origin": origin, b"sec-fetch-site": site}
    headers = {name: value.encode() for name, value in given.items() if value is not None}
    assert HostCheck((), origins).has_allowed_origin(headers) is allowed


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_listener_address_is_classified_as_loopback(name: str) -> None:
    assert is_loopback(name)
    assert is_on_loopback((name, 8080))


@pytest.mark.parametrize(
    "at", [("0.0.0.0", 80), ("::", 80, 0, 0), ("10.0.0.1", 80), ("fd00::1", 80), "/run/g.sock", b"", None]
)
def test_wildcard_private_or_unix_listener_is_not_on_loopback(at: object) -> None:
    assert not is_on_loopback(at)
