"""AWS Signature Version 4: the headers that prove who asks, for one request. Pure.

Owns the arithmetic (https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html). The
time and the keys are arguments. Promises: what is signed is the URL as it travels; the secret never comes out.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote

from yarl import URL

from artifacts.http.origin import get_origin

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY = hashlib.sha256(b"").hexdigest()
"""The sum of a request without a body."""
_UNRESERVED = "-._~"


@dataclass(frozen=True, slots=True)
class Keys:
    """Who asks."""

    access: str
    secret: str = field(repr=False)
    session: str = field(default="", repr=False)
    """The token that comes with keys that end."""


class Scope(NamedTuple):
    """What a signature is good for."""

    region: str
    service: str
    """`s3`, `ecr`, `sts`."""


class Asked(NamedTuple):
    """A request."""

    method: str
    url: URL
    """Encoded as `encode_uri` does it."""
    headers: Mapping[str, str] = {}
    body: bytes = b""


def sign_request(asked: Asked, keys: Keys, scope: Scope, unix_s: float) -> dict[str, str]:
    """Its headers with those that sign them, its URL and its body. Send all as they are.

    The Host header is signed and left out: it is the transport's to send.
    """
    method, url, headers, body = asked
    at = datetime.fromtimestamp(unix_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    summed = hashlib.sha256(body).hexdigest() if body else EMPTY
    sent = {**headers, "X-Amz-Date": at}
    if scope.service == "s3":
        sent["X-Amz-Content-Sha256"] = summed
    if keys.session:
        sent["X-Amz-Security-Token"] = keys.session
    rows = {name.lower(): " ".join(value.split()) for name, value in (*sent.items(), ("host", str(get_origin(url))))}
    names = ";".join(sorted(rows))
    path = url.raw_path or "/"
    canonical = "\n".join(
        (
            method,
            path if scope.service == "s3" else quote(path, safe="/" + _UNRESERVED),  # all but S3 encode it twice
            _query(url.raw_query_string),
            *(f"{name}:{rows[name]}" for name in sorted(rows)),
            "",
            names,
            summed,
        )
    )
    good_for = f"{at[:8]}/{scope.region}/{scope.service}/aws4_request"
    text = f"{ALGORITHM}\n{at}\n{good_for}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{keys.secret}".encode()
    for part in (at[:8], scope.region, scope.service, "aws4_request"):
        key = _keyed(key, part)
    signature = _keyed(key, text).hex()
    proof = f"{ALGORITHM} Credential={keys.access}/{good_for}, SignedHeaders={names}, Signature={signature}"
    return sent | {"Authorization": proof}


def encode_uri(text: str, *, path: bool = False) -> str:
    """As AWS wants a part of a URL written; of a `path` each / stays."""
    return quote(text, safe=_UNRESERVED + "/" * path)


def _query(text: str) -> str:
    """In the order in which it is signed."""
    pairs = [one.partition("=") for one in text.split("&") if one]
    return "&".join(f"{name}={value}" for name, _, value in sorted(pairs))


def _keyed(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
