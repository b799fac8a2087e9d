"""Real S3-compatible stores (MinIO, versitygw) as processes on loopback, and helpers that write objects into them.

Each is searched on the PATH, unless PILOTLIGHT_MINIO or PILOTLIGHT_VERSITYGW names the program; without one its tests
are skipped. They only run as separate programs: our code includes nothing of them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import io
import json
import os
import secrets
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import aiohttp
import pytest
from yarl import URL

from artifacts.credentials import sigv4
from artifacts.credentials.sigv4 import Asked, Keys, Scope
from artifacts.http import xml
from artifacts.http.xml import Element
from tests.contracts.bucket import REGION
from tests.support.net.certificates import OURS, leaf, sides, write
from tests.support.net.ports import free_port

DOMAIN = "s3.test"
"""The suffix of its virtual-hosted buckets: BUCKET.s3.test."""
STARTS_S_MAX = 90.0


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    """The name of its program."""
    url: str
    keys: Keys
    """The owner's keys."""
    folder: Path
    """The folder of its data and its log."""
    begins: Callable[[], subprocess.Popen[bytes]]
    tls: ssl.SSLContext | None = None
    """The client's TLS context; None: plain HTTP."""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def env(self, keys: Keys | None = None) -> dict[str, str]:
        """The environment variables of AWS for a client of the server."""
        of = keys or self.keys
        token = {"AWS_SESSION_TOKEN": of.session} if of.session else {}
        named = {"AWS_ACCESS_KEY_ID": of.access, "AWS_SECRET_ACCESS_KEY": of.secret, **token}
        return {"AWS_ENDPOINT_URL": self.url, "AWS_REGION": REGION, **named}

    def begin(self) -> None:
        """Starts the server; returns when its buckets and keys are loaded, too: it answers earlier than that."""
        process = self.begins()
        self.running.append(process)
        until_s = time.monotonic() + STARTS_S_MAX
        url = f"{self.url}/"
        while True:
            headers = sigv4.sign_request(Asked("GET", URL(url)), self.keys, Scope(REGION, "s3"), time.time())
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, http.client.HTTPException),
                urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=self.tls),
            ):
                return
            output = (self.folder / "log").read_text()
            assert process.poll() is None, output
            assert time.monotonic() < until_s, output
            time.sleep(0.05)

    def kill(self) -> None:
        """Sends SIGKILL."""
        process = self.running.pop()
        process.kill()
        process.wait()


class _Begins(NamedTuple):
    """How a server is started."""

    words: tuple[str, ...]
    env: Mapping[str, str]


def _minio(host: str, keys: Keys, folder: Path) -> _Begins:
    words = ("server", "--quiet", "--address", host, "--certs-dir", str(folder / "certs"), str(folder / "data"))
    env = {
        "MINIO_ROOT_USER": keys.access, "MINIO_ROOT_PASSWORD": keys.secret, "MINIO_SITE_REGION": REGION,
        "MINIO_DOMAIN": DOMAIN, "MINIO_BROWSER": "off", "MINIO_UPDATE": "off", "MINIO_CI_CD": "1",
    }  # fmt: skip
    return _Begins(words, env)


def _versitygw(host: str, keys: Keys, folder: Path) -> _Begins:
    data, users = folder / "data", folder / "users"
    data.mkdir()
    users.mkdir()
    words = ("--port", host, "--quiet", "--region", REGION, "--virtual-domain", DOMAIN, "--iam-dir", str(users))
    return _Begins((*words, "posix", str(data)), {"ROOT_ACCESS_KEY": keys.access, "ROOT_SECRET_KEY": keys.secret})


_SERVERS = {
    "minio": (_minio, "github.com/minio/minio"),
    "versitygw": (_versitygw, "github.com/versity/versitygw/cmd/versitygw"),
}
"""By program name: how each is started, and the argument of `go install`."""


def program(name: str) -> str:
    """Path of the program; skips the test if it is not installed."""
    variable = f"PILOTLIGHT_{name.upper()}"
    found = os.environ.get(variable) or shutil.which(name)
    if found is None:
        where = f"{name} is not on the PATH, nor named by {variable}"
        pytest.skip(f"{where} (CGO_ENABLED=0 go install {_SERVERS[name][1]}@latest)")
    return found


@contextlib.contextmanager
def serving(
    name: str, folder: Path, more: Mapping[str, str] | None = None, *, secure: bool = False
) -> Iterator[Server]:
    """Runs a server with its own folder until the context ends. `more`: extra environment. `secure`: MinIO with TLS."""
    found = program(name)
    host = f"127.0.0.1:{free_port()}"
    keys = Keys(secrets.token_hex(8), secrets.token_hex(16))
    words, own = _SERVERS[name][0](host, keys, folder)
    if secure:
        (folder / "certs").mkdir()
        for file, usual in zip(write(folder / "certs", "ours", leaf(OURS)), ("public.crt", "private.key"), strict=True):
            file.rename(folder / "certs" / usual)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **own, **(more or {})}

    def begins() -> subprocess.Popen[bytes]:
        with (folder / "log").open("ab") as log:
            return subprocess.Popen([found, *words], env=env, cwd=folder, stdout=log, stderr=log)

    url, tls = (f"https://{host}", sides().client) if secure else (f"http://{host}", None)
    server = Server(name, url, keys, folder, begins, tls)
    try:
        server.begin()
        yield server
    finally:
        while server.running:
            server.kill()


class RealRig:
    """Implements `contracts.bucket.Rig`: a bucket of its own on a running server."""

    def __init__(self, server: Server) -> None:
        self.server, self.bucket = server, f"models-{secrets.token_hex(4)}"

    async def make(self) -> None:
        """Creates the bucket."""
        await self._ask("PUT", "")

    def env(self) -> dict[str, str]:
        """See Rig."""
        return self.server.env()

    async def session(self, *reads: str) -> dict[str, str]:
        """See Rig. `reads`: if given, the only objects that it may read of those that it may list."""
        if self.server.name != "minio":
            pytest.skip(f"{self.server.name} gives no keys that end")
        requested = {"Action": "AssumeRole", "Version": "2011-06-15", "DurationSeconds": "3600"}
        if reads:
            requested["Policy"] = self._policy({"s3:ListBucket": ("",), "s3:GetObject": [f"/{one}" for one in reads]})
        body = urlencode(requested).encode()
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        asked = Asked("POST", URL(f"{self.server.url}/", encoded=True), headers, body)
        _, response = await self._sent(asked, "sts")
        way = ("AssumeRoleResult", "Credentials")
        access, secret, token = (
            response.one(*way, name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")
        )
        return self.server.env(Keys(access, secret, token))

    async def put(self, key: str, content: bytes, *, summed: bool = False) -> None:
        """See Rig."""
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        await self._ask("PUT", key, content, {"x-amz-checksum-sha256": digest} if summed else {})

    async def put_parts(self, key: str, parts: Sequence[bytes]) -> None:
        """See Rig."""
        _, begun = await self._ask("POST", key, query="uploads=")
        id_, rows = sigv4.encode_uri(begun.one("UploadId")), list[str]()
        for number, part in enumerate(parts, 1):
            etag, _ = await self._ask("PUT", key, part, query=f"partNumber={number}&uploadId={id_}")
            rows.append(f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>")
        whole = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>"
        await self._ask("POST", key, whole.encode(), query=f"uploadId={id_}")

    async def show_all(self) -> None:
        """See Rig."""
        policy = self._policy({"s3:ListBucket": ("",), "s3:GetObject": ("/*",)}, Principal="*")
        await self._ask("PUT", "", policy.encode(), query="policy=")

    def _policy(self, may: Mapping[str, Sequence[str]], **who: str) -> str:
        """`may`: the actions, and the parts of the bucket for which each is allowed."""
        rows = [
            {
                "Effect": "Allow",
                "Action": what,
                "Resource": [f"arn:aws:s3:::{self.bucket}{one}" for one in which],
                **who,
            }
            for what, which in may.items()
        ]
        return json.dumps({"Version": "2012-10-17", "Statement": rows})

    async def _ask(
        self, method: str, key: str, body: bytes = b"", headers: Mapping[str, str] | None = None, query: str = ""
    ) -> tuple[str, Element]:
        url = f"{self.server.url}/{self.bucket}/{sigv4.encode_uri(key, path=True)}{'?' * bool(query)}{query}"
        asked = Asked(method, URL(url, encoded=True), headers or {}, body)
        return await self._sent(asked, "s3")

    async def _sent(self, asked: Asked, service: str) -> tuple[str, Element]:
        """ETag and document of the response, which must be a success."""
        headers = sigv4.sign_request(asked, self.server.keys, Scope(REGION, service), time.time())
        body = io.BytesIO(asked.body) if asked.body else None
        async with (
            aiohttp.ClientSession() as session,
            session.request(asked.method, asked.url, headers=headers, data=body, ssl=self.server.tls or True) as answer,
        ):
            text = await answer.read()
            assert answer.status in {200, 204}, text
        return answer.headers.get("ETag", ""), xml.parse_xml(text) if text else Element("")
