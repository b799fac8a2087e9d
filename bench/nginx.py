"""nginx and HAProxy in the benchmarks: one worker process, persistent connections, unbuffered responses.

nginx is also the engine where the engine must not be the bottleneck: it answers every request with the same chat
completion of 650 bytes (`python -m bench.nginx PORT FOLDER` runs it). All files are in the benchmark's folder, and both
listen on loopback only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench import engine, kit, upstream

_NGINX = """\
worker_processes 1; daemon off; pid {place}/pid; error_log {place}/error.log warn; worker_rlimit_nofile 20000;
events {{ worker_connections 18000; multi_accept on; }}
http {{
  access_log off; tcp_nodelay on; keepalive_requests 100000000; keepalive_timeout 3600s;
  client_body_buffer_size 2m; client_max_body_size 64m;
  client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
  uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
  {more}
}}
"""
_ENGINE = """\
server {{
    listen {host}:{port} backlog=4096;
    default_type application/json;
    location / {{ return 200 '{answer}'; }}
  }}"""
_PROXY = """\
upstream engine {{ server {engine}; keepalive 1024; keepalive_requests 100000000; }}
  server {{
    listen {host}:{port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 3600s;
    }}
  }}"""
_HAPROXY = """\
global
  nbthread 1
  maxconn 9000
defaults
  mode http
  timeout connect 5s
  timeout client 3600s
  timeout server 3600s
  option http-keep-alive
  http-reuse always
frontend front
  bind {host}:{port}
  option http-buffer-request
  default_backend engines
backend engines
  server engine {engine} pool-max-conn 4096
"""


def nginx_proxy(place: Path, port: int, engine: str) -> list[str]:
    """Return the command of an nginx in front of an engine (`host:port`)."""
    return _nginx(place, _PROXY.format(host=kit.HOST, port=port, engine=engine))


def haproxy(place: Path, port: int, engine: str) -> list[str]:
    """Return the command of an HAProxy in front of an engine."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "haproxy.cfg").write_text(_HAPROXY.format(host=kit.HOST, port=port, engine=engine))
    return ["haproxy", "-db", "-f", str(place / "haproxy.cfg")]


def _nginx(place: Path, more: str) -> list[str]:
    place.mkdir(parents=True, exist_ok=True)
    (place / "nginx.conf").write_text(_NGINX.format(place=place, more=more))
    return ["nginx", "-e", str(place / "error.log"), "-c", str(place / "nginx.conf")]


def main() -> None:
    """Run the engine in place of this process."""
    port, place = int(sys.argv[1]), Path(sys.argv[2])
    command = _nginx(place / "engine", _ENGINE.format(host=kit.HOST, port=port, answer=upstream.ANSWER.decode()))
    (place / engine.PORT).write_text(str(port))
    os.execvp(command[0], command)  # noqa: S606  replaces this process, so that no parent is left


if __name__ == "__main__":
    main()
