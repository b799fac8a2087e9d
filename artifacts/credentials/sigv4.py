"""AWS Signature Version 4: computes the headers that authenticate one request. Pure.

Source: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html. The time and the
keys are arguments. The URL is signed exactly as it is sent; the secret key never appears in the output.
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

from artifacts.http.url_policy import get_origin

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY = hashlib.sha256(b"").hexdigest()
"""SHA-256 of an empty request body."""
_UNRESERVED = "-._~"


@dataclass(frozen=True, slots=True)
class Keys:
    """An access key."""

    access: str
    secret: str = field(repr=False)
    session: str = field(default="", repr=False)
    """Session token of temporary keys."""


class Scope(NamedTuple):
    """The region and service for which a signature is valid."""

    region: str
    service: str
    """`s3`, `ecr`, `sts`."""


class Asked(NamedTuple):
    """A request to sign."""

    method: str
    url: URL
    """Must be encoded as by `encode_uri`."""
    headers: Mapping[str, str] = {}
    body: bytes = b""


def sign_request(asked: Asked, keys: Keys, scope: Scope, unix_s: float) -> dict[str, str]:
    """Return the headers plus the signing headers; headers, URL and body must be sent unchanged.

    The Host header is signed but not returned, since the transport sends it.
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
    """Percent-encode a URL component as AWS requires; in a `path` each / is kept."""
    return quote(text, safe=_UNRESERVED + "/" * path)


def _query(text: str) -> str:
    """Return the query parameters in canonical order."""
    pairs = [one.partition("=") for one in text.split("&") if one]
    return "&".join(f"{name}={value}" for name, _, value in sorted(pairs))


def _keyed(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
