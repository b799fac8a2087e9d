"""Proxies with their default buffering and timeouts: the shortest configuration on the pages about nginx, HAProxy and
Caddy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.how_to import code_blocks
from tests.support.net.origin_client import listens, running_proxy
from tests.support.net.ports import free_port

GATEWAY = "127.0.0.1:8080"
NGINX_AROUND = """daemon off; master_process off; pid FOLDER/pid; error_log /dev/null;
events { worker_connections 256; }
http {
  access_log off; client_body_temp_path FOLDER/a; proxy_temp_path FOLDER/b; fastcgi_temp_path FOLDER/c;
  uwsgi_temp_path FOLDER/d; scgi_temp_path FOLDER/e;
CONFIGURATION
}
"""
HAPROXY_AROUND = "global\n  maxconn 256\nCONFIGURATION"


class Default(NamedTuple):
    """How the shortest configuration of a page is run."""

    language: str
    listens: tuple[str, str]
    """The address of the page, and that of the test."""
    around: str
    """What surrounds it. CONFIGURATION stands for the configuration of the page."""
    timeouts: tuple[tuple[str, str], ...]
    """Shorter timeouts: text of the page and what replaces it. SECONDS stands for the timeout."""


DEFAULTS = {
    "nginx": Default(
        "nginx",
        ("listen 80;", "listen 127.0.0.1:PORT;"),
        NGINX_AROUND,
        ((";\n    }", ";\n proxy_read_timeout SECONDSs; proxy_send_timeout SECONDSs; }"),),
    ),
    "haproxy": Default(
        "haproxy",
        ("bind :80", "bind 127.0.0.1:PORT"),
        HAPROXY_AROUND,
        (("timeout client 50s", "timeout client SECONDSs"), ("timeout server 50s", "timeout server SECONDSs")),
    ),
    "caddy": Default(
        "caddyfile",
        (":80 {", ":PORT {"),
        "{\n\tadmin off\n\tdefault_bind 127.0.0.1\n\tstorage file_system FOLDER/storage\n}\nCONFIGURATION",
        (
            (
                "buffer_requests",
                "buffer_requests\ntransport http {\nread_timeout SECONDSs\nresponse_header_timeout SECONDSs\n}",
            ),
        ),
    ),
}


def shortest_configuration(name: str, folder: Path, port: int, origin: int, timeout_s: int | None) -> str:
    """Return the last configuration of a page, with the addresses and files of a test."""
    default = DEFAULTS[name]
    text = code_blocks(f"proxies-{name}.md", default.language)[-1]
    timeouts = () if timeout_s is None else default.timeouts
    for documented, used in (*timeouts, default.listens, (GATEWAY, f"127.0.0.1:{origin}")):
        assert text.count(documented) == 1, f"{documented} is not once in the last configuration of the page"
        text = text.replace(documented, used)
    text = default.around.replace("CONFIGURATION", text)
    return text.replace("FOLDER", str(folder)).replace("PORT", str(port)).replace("SECONDS", str(timeout_s))


@contextmanager
def default_proxy(name: str, folder: Path, origin: int, timeout_s: int | None = None) -> Iterator[int]:
    """Run a proxy in front of a gateway; yield its port. `timeout_s` replaces its timeouts for silent connections."""
    port = free_port()
    with running_proxy(name, folder, shortest_configuration(name, folder, port, origin, timeout_s)) as process:
        listens(port, process, "/health")
        yield port
