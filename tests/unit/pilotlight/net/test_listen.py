"""Parsing of listen addresses, and the error if an address is in use."""

from __future__ import annotations

import asyncio
import socket

import click
import pytest
import uvloop

from pilotlight.net.listen import ACCEPTS, Address, AddressType, check_operations, open_listeners, start_servers

pytestmark = pytest.mark.standard


@pytest.mark.parametrize(
    ("text", "address", "loopback", "url"),
    [
        ("127.0.0.1:8080", Address("127.0.0.1", 8080), True, "http://127.0.0.1:8080"),
        ("localhost:0", Address("localhost", 0), True, "http://localhost:0"),
        ("[::1]:8080", Address("::1", 8080), True, "http://[::1]:8080"),
        ("[::ffff:127.0.0.1]:80", Address("::ffff:127.0.0.1", 80), True, "http://[::ffff:127.0.0.1]:80"),
        ("[::ffff:10.0.0.1]:80", Address("::ffff:10.0.0.1", 80), False, "http://[::ffff:10.0.0.1]:80"),
        (":8080", Address("0.0.0.0", 8080), False, "http://0.0.0.0:8080"),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535), False, "http://10.0.0.1:65535"),
        ("gateway.example:80", Address("gateway.example", 80), False, "http://gateway.example:80"),
    ],
)
def test_listen_address_is_parsed_to_host_port_loopback_flag_and_url(
    text: str, address: Address, loopback: bool, url: str
) -> None:
    read = AddressType().convert(text, None, None)
    assert (read, read.loopback, read.url) == (address, loopback, url)
    assert AddressType().convert(read, None, None) is read


@pytest.mark.parametrize(
    "text", ["", "8080", "127.0.0.1", "127.0.0.1:", "a:-1", "a:65536", "a:http", "a:\u00b2", "a:1_0", "a:" + "9" * 5000]
)
def test_invalid_listen_address_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not HOST:PORT such as 127\.0\.0\.1:8080"):
        AddressType().convert(text, None, None)


@pytest.mark.parametrize("auth", ["auto", "keys"])
def test_operations_port_requires_loopback_unless_auth_is_none(auth: str) -> None:
    check_operations(Address("127.0.0.1", 8081), auth)
    check_operations(Address("0.0.0.0", 8081), "none")
    with pytest.raises(click.UsageError, match=r"^--ops 0\.0\.0\.0:8081: other machines could reach"):
        check_operations(Address("0.0.0.0", 8081), auth)


def test_several_listeners_opened_for_one_address_share_its_port() -> None:
    made = open_listeners(Address("127.0.0.1", 0), 3)
    try:
        ports = {one.getsockname()[1] for one in made}
        assert len(ports) == 1
        assert all(one.get_inheritable() for one in made)
        with socket.create_connection(("127.0.0.1", ports.pop()), timeout=60):
            pass
    finally:
        for one in made:
            one.close()


def test_taken_port_is_a_one_line_error() -> None:
    made = open_listeners(Address("127.0.0.1", 0), 1)
    port = made[0].getsockname()[1]
    try:
        with pytest.raises(click.ClickException) as caught:
            open_listeners(Address("127.0.0.1", port), 2)
    finally:
        made[0].close()
    assert caught.value.message == f"127.0.0.1:{port} is already in use: choose another port"


def test_listening_on_a_non_local_address_is_a_one_line_error() -> None:
    with pytest.raises(click.ClickException, match=r"^cannot listen on 192\.0\.2\.1:0: "):
        open_listeners(Address("192.0.2.1", 0), 1)


def test_unknown_host_name_is_a_one_line_error() -> None:
    with pytest.raises(click.ClickException, match=r"^cannot listen on nowhere\.invalid:0: "):
        open_listeners(Address("nowhere.invalid", 0), 1)


def test_event_loop_accepts_several_connections_per_iteration() -> None:
    """New clients do not wait one busy iteration each. The test counts iterations, not time."""
    clients = 4 * ACCEPTS

    async def turns() -> int:
        made: list[asyncio.BaseTransport] = []

        class Counted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.append(transport)

        (listener,) = open_listeners(Address("127.0.0.1", 0), 1)
        listener.setblocking(False)
        waiting = [socket.create_connection(listener.getsockname()) for _ in range(clients)]
        servers = await start_servers(Counted, listener)
        count = 0
        while len(made) < clients:
            await asyncio.sleep(0)
            count += 1
            assert count < 10 * clients
        for client in waiting:
            client.close()
        for server in servers:
            server.close()
        for transport in made:
            transport.close()
        return count

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(turns()) < clients
