"""The contract over TCP on real sockets: which clients and servers are accepted, and the error otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
import pytest

from autoscaler.agent_contract import NodeReport
from autoscaler.contract import GatewayId, Report, RoutesDelta
from autoscaler.server import auth
from autoscaler.server.auth import AGENT, BOTH, GATEWAY, Admits, Authenticated, ContractAuth, Roles
from autoscaler.server.gateways import ENDPOINTS, ContractServer
from gateway.control.client import HttpLink
from gateway.control.sync import LinkError
from pilotlight.net import certificates, contract_access, file_reload
from pilotlight.net.certificates import Identity
from pilotlight.net.contract_access import Access
from pilotlight.net.file_reload import Files
from pilotlight.net.listen import Address
from tests.support.builders.worlds import device, gateway, model, replica, world
from tests.support.harness.manual_loop import SteppedLoop
from tests.support.net.certificates import OURS, THEIRS, leaf, write, write_authority
from tests.support.net.ports import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.standard

A = model("a")
REPORT = Report(gateway=GatewayId("g1"), boot="b", sequence=2)
TOKEN, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
LOOPBACK = Address("127.0.0.1", 0)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """The token file of the autoscaler."""
    return written(tmp_path / "token", TOKEN)


def written(path: Path, *tokens: str) -> Path:
    path.write_text("\n".join(tokens) + "\n")
    path.chmod(0o600)
    return path


def mutual(folder: Path, name: str = OURS, believed: str = OURS) -> Identity:
    """The files of one side of mutual TLS."""
    pair = write(folder, f"side-{name}", leaf(name))
    return Identity(cert=pair.cert, key=pair.key, ca=write_authority(folder, believed))


@contextlib.asynccontextmanager
async def autoscaler(given: Access, admits: Admits | None = None) -> AsyncIterator[tuple[str, Files]]:
    """Serve the contract of a small `World` on a free port; yields its address and its files."""
    files, port = Files(), free_port()
    stepped = SteppedLoop(world([A], [device()], [replica(A, "r1", address="127.0.0.1:9")], gateways=[gateway("g1")]))
    stepped.step()
    runner = await contract_access.open_port(
        ContractServer(stepped.loop), Address("127.0.0.1", port), given, files, admits
    )
    following = asyncio.create_task(files.follow())
    try:
        yield f"{'http' if given.identity.cert is None else 'https'}://127.0.0.1:{port}", files
    finally:
        following.cancel()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def link(url: str, given: Access) -> AsyncIterator[HttpLink]:
    """A gateway's link to the autoscaler."""
    (one,) = contract_access.Ways([url], given, Files()).links
    try:
        yield one
    finally:
        await one.close()


async def let_in(url: str, given: Access) -> bool:
    """Whether a gateway with these files can both report and follow. It never can do just one of them."""
    async with link(url, given) as one:
        try:
            await one.report(REPORT)
        except LinkError:
            with pytest.raises(LinkError):
                [line async for line in one.lines("/v1/routes?gateway=g1&boot=b")]
            return False
        async with asyncio.timeout(60):
            async for line in one.lines("/v1/routes?gateway=g1&boot=b"):
                return [route.replica for route in msgspec.json.decode(line, type=RoutesDelta).replicas] == ["r1"]
        return False


async def test_gateway_with_any_token_of_the_token_file_is_admitted(token: Path, tmp_path: Path) -> None:
    written(token, OTHER, TOKEN)
    async with autoscaler(Access(token=token)) as (url, _):
        assert await let_in(url, Access(token=token)), "it shows the first of them"
        assert await let_in(url, Access(token=written(tmp_path / "mine", TOKEN))), "any of them is taken"


@pytest.mark.parametrize(("bound", "status"), [("n1", 200), ("", 200), ("n2", 403)])
async def test_node_bound_token_is_rejected_for_other_nodes_with_403(bound: str, status: int) -> None:
    async def admits(_: str) -> Authenticated | None:
        return Authenticated(node=bound)

    report = msgspec.json.encode(NodeReport(node="n1", boot="b", sequence=1))
    headers = {"authorization": f"Bearer {OTHER}"}
    async with autoscaler(Access(), admits) as (url, _), aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{url}/v1/node", data=report) as answer:
            assert answer.status == status
        for path in ("/v1/wants?node=n1", "/v1/peers?node=n1&artifact=oci://r.io/a:1"):
            async with session.get(f"{url}{path}") as answer:
                assert answer.status == status


async def statuses(url: str, token: str = "", tls: ssl.SSLContext | bool = True) -> dict[str, int]:
    """The status of each endpoint of the contract for a valid request with this token."""
    node = msgspec.json.encode(NodeReport(node="n1", boot="b", sequence=1))
    posts = {"/v1/report": msgspec.json.encode(REPORT), "/v1/node": node}
    query = {"gateway": "g1", "boot": "b", "node": "n1", "artifact": "oci://r.io/a:1"}
    found: dict[str, int] = {}
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        for path in ENDPOINTS:
            method = "POST" if path in posts else "GET"
            async with session.request(method, url + path, params=query, data=posts.get(path), ssl=tls) as answer:
                found[path] = answer.status
    return found


def permitted(roles: Roles) -> dict[str, int]:
    """The expected statuses for a client with these roles."""
    return {path: 200 if role in roles else 403 for path, role in ENDPOINTS.items()}


def test_every_registered_autoscaler_api_endpoint_has_a_required_role() -> None:
    stepped = SteppedLoop(world([A], [device()]))
    app = ContractServer(stepped.loop).application()
    assert {one.canonical for one in app.router.resources()} == ENDPOINTS.keys()


@pytest.mark.parametrize("roles", [GATEWAY, AGENT, BOTH])
async def test_service_account_can_use_only_endpoints_of_its_roles(roles: Roles) -> None:
    async def admits(_: str) -> Authenticated | None:
        return Authenticated(roles=roles)

    async with autoscaler(Access(), admits) as (url, _):
        assert await statuses(url, OTHER) == permitted(roles)


async def test_each_token_file_allows_only_endpoints_of_its_role(
    token: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with autoscaler(Access(token=token)) as (url, _):
        assert await statuses(url, TOKEN) == permitted(BOTH), "one file is for both, as before"
    agents = written(tmp_path / "agents", OTHER)
    async with autoscaler(Access(token=token, agent_token=agents)) as (url, _):
        assert await statuses(url, TOKEN) == permitted(GATEWAY)
        assert await statuses(url, OTHER) == permitted(AGENT)
        assert set((await statuses(url, "0" * 32)).values()) == {401}
        caplog.clear()
        async with link(url, Access(token=agents)) as one:
            with pytest.raises(LinkError):
                await one.report(REPORT)
    refused, distrusted = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert refused == "event=contract_refused path=/v1/report role='agent' required_role=gateway reason='wrong role'"
    assert "the autoscaler rejects this gateway's token or certificate: it belongs to an agent" in distrusted


@pytest.mark.parametrize(
    ("name", "given", "roles"),
    [
        ("pilotlight-agent", "pilotlight-agent", AGENT),
        ("pilotlight-gateway", "pilotlight-agent", GATEWAY),
        ("pilotlight-agent", "", BOTH),
    ],
)
async def test_client_certificate_grants_exactly_the_roles_of_its_name(
    tmp_path: Path, name: str, given: str, roles: Roles
) -> None:
    pair = write(tmp_path, "client", leaf(OURS, name))
    shown = Identity(cert=pair.cert, key=pair.key, ca=write_authority(tmp_path, OURS))
    async with autoscaler(Access(identity=mutual(tmp_path), agent_name=given)) as (url, _):
        assert await statuses(url, tls=certificates.build_client_context(shown)) == permitted(roles)


async def test_certificate_and_token_of_different_roles_get_403(tmp_path: Path, token: Path) -> None:
    pair = write(tmp_path, "client", leaf(OURS, "pilotlight-agent"))
    shown = Identity(cert=pair.cert, key=pair.key, ca=write_authority(tmp_path, OURS))
    both = Access(
        identity=mutual(tmp_path), token=token, agent_token=written(tmp_path / "agents", OTHER),
        agent_name="pilotlight-agent",
    )  # fmt: skip
    async with autoscaler(both) as (url, _):
        assert set((await statuses(url, TOKEN, certificates.build_client_context(shown))).values()) == {403}
        assert await statuses(url, OTHER, certificates.build_client_context(shown)) == permitted(AGENT)


@pytest.mark.parametrize(
    ("certificate", "roles"),
    [
        ({"subject": ((("commonName", "a"),),)}, AGENT),
        ({"subject": ((("organizationName", "a"),), (("commonName", "b"),))}, GATEWAY),
        ({"subject": ((("commonName", "a"),),), "subjectAltName": (("DNS", "b"),)}, GATEWAY),
        ({"subjectAltName": (("IP Address", "a"), ("DNS", "A"), ("DNS", "b"))}, GATEWAY),
        ({"subjectAltName": (("DNS", "b"), ("DNS", "a"))}, AGENT),
        ({}, GATEWAY),
    ],
)
def test_certificate_common_name_is_used_only_without_dns_names(certificate: dict[str, Any], roles: Roles) -> None:
    assert auth.read_certificate_roles(certificate, "a") == roles


async def test_token_approved_by_external_authenticator_is_admitted(token: Path, tmp_path: Path) -> None:
    asked = list[str]()

    async def admits(shown: str) -> Authenticated | None:
        asked.append(shown)
        return Authenticated() if shown == OTHER else None

    vouched, wrong = written(tmp_path / "vouched", OTHER), written(tmp_path / "wrong", "0" * 32)
    async with autoscaler(Access(token=token), admits) as (url, _):
        assert await let_in(url, Access(token=token))
        assert not asked, "the shared secret is enough"
        assert await let_in(url, Access(token=vouched))
        assert not await let_in(url, Access(token=wrong))
        assert not await let_in(url, Access())
    async with autoscaler(Access(), admits) as (url, _):
        assert await let_in(url, Access(token=vouched))
        assert not await let_in(url, Access())
    assert set(asked) == {OTHER, "0" * 32, ""}


async def test_invalid_token_gets_401_and_is_logged_once_by_client_and_server(
    token: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = written(tmp_path / "wrong", OTHER)
    async with autoscaler(Access(token=token)) as (url, _):
        async with link(url, Access(token=wrong)) as one:
            for _ in range(3):
                with pytest.raises(LinkError):
                    await one.report(REPORT)
        messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(messages) == 2
        assert messages[0] == "event=contract_refused count=1 reason='requests without a valid token'"
        assert messages[1].startswith(
            "event=autoscaler_distrust reason='the autoscaler rejects the token of this gateway: "
        )
        assert not await let_in(url, Access())
        async with aiohttp.ClientSession() as session:
            for headers in (
                {},
                {"authorization": TOKEN},
                {"authorization": f"Basic {TOKEN}"},
                {"authorization": "Bearer"},
            ):
                for path in ("/v1/routes?gateway=g1", "/v1/catalogue", "/v1/nothing", "/"):
                    async with session.get(url + path, headers=headers) as answer:
                        assert (answer.status, await answer.read()) == (401, b'{"error":"not allowed"}')
    assert TOKEN not in caplog.text
    assert OTHER not in caplog.text


async def test_rejected_clients_are_logged_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    times_s = iter((0.0, 1.0, auth.SAY_EVERY_S - 1, auth.SAY_EVERY_S, auth.SAY_EVERY_S + 1))
    one = ContractAuth(lambda: (TOKEN,), lambda: next(times_s))
    assert one.roles(f"Bearer {TOKEN}") == BOTH
    assert one.roles(f"bearer {TOKEN}") == BOTH
    for wrong in ("", "Bearer", f"Bearer {TOKEN} ", f"Bearer {TOKEN[:-1]}", f"Bearer \udcff{TOKEN}", TOKEN):
        assert not one.roles(wrong)
    assert not ContractAuth(list).roles("Bearer "), "without a valid token no client is admitted"
    for _ in range(5):
        one.refused()
    assert [record.getMessage().split()[1] for record in caplog.records] == ["count=1", "count=3"]


async def test_rotated_token_takes_effect_without_restart(
    token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reload, "LOOK_S", 0.01)
    old, new = written(tmp_path / "old", TOKEN), written(tmp_path / "new", OTHER)
    async with autoscaler(Access(token=token)) as (url, _):
        assert not await let_in(url, Access(token=new))
        written(token, OTHER)
        async with link(url, Access(token=new)) as one:

            async def taken() -> bool:
                with contextlib.suppress(LinkError):
                    await one.report(REPORT)
                    return True
                return False

            async with asyncio.timeout(60):
                while not await taken():
                    await asyncio.sleep(0.01)
        assert not await let_in(url, Access(token=old))


async def test_mutual_tls_admits_only_certificates_of_the_configured_ca(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with autoscaler(Access(identity=mutual(tmp_path))) as (url, _):
        assert await let_in(url, Access(identity=mutual(tmp_path)))
        only_trust = Identity(ca=write_authority(tmp_path, OURS))
        assert not await let_in(url, Access(identity=only_trust)), "no certificate"
        (message,) = [record.getMessage() for record in caplog.records]
        assert message == (
            "event=autoscaler_distrust reason='the autoscaler closes the connections: it may require another "
            "certificate (--contract-cert-file)'"
        )
        assert not await let_in(url, Access(identity=mutual(tmp_path, THEIRS, OURS))), "a foreign one"


async def test_tls_with_token_file_still_requires_a_token(tmp_path: Path, token: Path) -> None:
    pair = write(tmp_path, "server", leaf(OURS))
    believed = Identity(ca=write_authority(tmp_path, OURS))
    async with autoscaler(Access(identity=Identity(cert=pair.cert, key=pair.key), token=token)) as (url, _):
        assert await let_in(url, Access(identity=believed, token=token))
        assert not await let_in(url, Access(identity=believed))


async def test_client_sends_no_token_to_an_untrusted_autoscaler(
    tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = write(tmp_path, "server", leaf(THEIRS))
    believed = Identity(ca=write_authority(tmp_path, OURS))
    async with autoscaler(Access(identity=Identity(cert=pair.cert, key=pair.key), token=token)) as (url, _):
        assert not await let_in(url, Access(identity=believed, token=token))
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert messages == [
        'event=autoscaler_distrust reason="the autoscaler\'s certificate: unable to get local issuer certificate"'
    ]


async def test_renewed_autoscaler_certificate_is_used_for_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_reload, "LOOK_S", 0.01)
    pair = write(tmp_path, "server", leaf(OURS))
    own, foreign = (Access(identity=mutual(tmp_path, OURS, believed)) for believed in (OURS, THEIRS))
    server = Identity(cert=pair.cert, key=pair.key, ca=write_authority(tmp_path, OURS))
    async with autoscaler(Access(identity=server)) as (url, _):
        assert await let_in(url, own)
        write(tmp_path, "server", leaf(THEIRS))
        await until("it is read again", lambda: "event=file_reloaded" in caplog.text)
        assert await let_in(url, foreign)
        assert not await let_in(url, own)


@pytest.mark.parametrize(
    ("address", "given", "message"),
    [
        (LOOPBACK, Access(), "any client could report: set --token-file"),
        (Address("10.0.0.1", 1), Access(token=Path("t")), "this address requires TLS"),
        (LOOPBACK, Access(identity=Identity(ca=Path("c"))), "this address requires TLS"),
        (LOOPBACK, Access(agent_token=Path("t")), "requires --token-file, or gateways cannot report"),
        (LOOPBACK, Access(token=Path("t"), agent_name="a"), "--agent-certificate-name requires --contract-ca-file"),
    ],
)
def test_autoscaler_api_port_without_authentication_or_tls_is_rejected(
    address: Address, given: Access, message: str
) -> None:
    with pytest.raises(click.UsageError, match=message):
        contract_access.check_port(address, given)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:80",
        "http://autoscaler:80",
        "autoscaler:80",
        "https://host",
        "ftp://h:1",
        "unix:",
        "https://h:1/x",
    ],
)
def test_invalid_or_unencrypted_autoscaler_url_is_rejected(url: str) -> None:
    with pytest.raises(click.UsageError, match=r"use https://|expected unix:PATH"):
        contract_access.check_autoscalers([url])


def test_unix_loopback_and_https_autoscaler_urls_are_accepted() -> None:
    contract_access.check_autoscalers(["unix:/a", "http://127.0.0.1:80", "http://[::1]:80/", "https://pl.example:8443"])


async def test_token_file_readable_by_other_users_prints_a_warning(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(contract_access, "write_stderr", messages.append)
    token.chmod(0o644)
    async with link("http://127.0.0.1:1", Access(token=token)):
        assert messages == [f"{token} can be read by other users of this machine: chmod 600 {token}"]
