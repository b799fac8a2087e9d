"""A fake S3 store on loopback that verifies each signature with its own implementation.

Shapes: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html; path style, as MinIO has it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, quote_plus, unquote
from xml.sax.saxutils import escape

from aiohttp import web

from tests.support.fakes.hub import ranged
from tests.support.fakes.registry import FakeRegistry

ACCESS, SECRET, REGION = "AKIATEST", "s3cretOfSomebody", "eu-test-1"
TOKEN = "t0kenOfASession"
SKEW_S_MAX = 900
_PROOF = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, SignedHeaders=([a-z0-9;-]+), "
    r"Signature=([0-9a-f]{64})"
)


class FakeS3(FakeRegistry):
    """One bucket, `models`."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects
        self.summed = False
        """Whether it stores and returns sha256 checksums."""
        self.lists_sums = True
        """Whether its list names the objects that have checksums."""
        self.open = False
        """Whether anyone may read it."""
        self.page = 2
        self.encodes = True
        """Whether it supports `encoding-type`."""
        self.token = ""
        """The session token without which its keys are rejected."""
        self.parts = dict[str, int]()
        """Number of parts of each object that was written in parts."""
        self.keeps_time = False
        """Whether it checks timestamps, as real stores do; tests have their own clocks."""

    def env(self, secret: str = SECRET) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": secret} if secret else {}
        token = {"AWS_SESSION_TOKEN": self.token} if self.token else {}
        return {"AWS_ENDPOINT_URL": self.url, "AWS_REGION": REGION, **keys, **token}

    async def _ordinary(self, request: web.Request) -> web.StreamResponse:
        refused = None if self.open and "Authorization" not in request.headers else self._refused(request)
        if refused is not None:
            return refused
        path = unquote(request.raw_path.partition("?")[0])
        if not path.startswith("/models/"):
            return _fault(404, "NoSuchBucket")
        key = path.removeprefix("/models/")
        if not key:
            return self._list(request)
        if key not in self.objects:
            return _fault(404, "NoSuchKey")
        return self._object(request, self.objects[key])

    def _object(self, request: web.Request, content: bytes) -> web.StreamResponse:
        key = unquote(request.raw_path).removeprefix("/models/")
        etag = f'"{self._etag(key)}"'
        if request.headers.get("If-Match", etag) != etag:
            return _fault(412, "PreconditionFailed")
        headers = {"ETag": etag}
        if self.summed and request.headers.get("x-amz-checksum-mode") == "ENABLED":
            headers["x-amz-checksum-sha256"] = base64.b64encode(hashlib.sha256(content).digest()).decode()
            headers["x-amz-checksum-type"] = "FULL_OBJECT"
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(content))})
        return ranged(request, content, headers)

    def _list(self, request: web.Request) -> web.StreamResponse:
        asked = request.query
        assert asked["list-type"] == "2"
        assert asked["encoding-type"] == "url"
        keys = sorted(key for key in self.objects if key.startswith(asked["prefix"]))
        at = int(asked.get("continuation-token", "0"))
        rows = "".join(self._row(key) for key in keys[at : at + self.page])
        more = at + self.page < len(keys)
        token = f"<NextContinuationToken>{at + self.page}</NextContinuationToken>" if more else ""
        head = '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        truncated = f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        truncated += "<EncodingType>url</EncodingType>" * self.encodes
        text = f"{head}<Name>models</Name>{truncated}{token}{rows}</ListBucketResult>"
        return web.Response(text=text, content_type="application/xml")

    def _row(self, key: str) -> str:
        content = self.objects[key]
        message = "<ChecksumAlgorithm>SHA256</ChecksumAlgorithm><ChecksumType>FULL_OBJECT</ChecksumType>"
        summed = message if self.summed and self.lists_sums else ""
        rest = f"<Size>{len(content)}</Size><StorageClass>STANDARD</StorageClass>{summed}"
        name = escape(quote_plus(key, safe="/") if self.encodes else key)
        return f"<Contents><Key>{name}</Key><ETag>&quot;{self._etag(key)}&quot;</ETag>{rest}</Contents>"

    def _etag(self, key: str) -> str:
        summed = hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest()
        return f"{summed}-{self.parts[key]}" if key in self.parts else summed

    def _refused(self, request: web.Request) -> web.Response | None:
        """Returns an error like that of Amazon S3; None: the signature is valid for what was received."""
        if "Authorization" not in request.headers:
            return _fault(403, "AccessDenied")
        found = _PROOF.fullmatch(request.headers["Authorization"])
        if found is None or found[3] != REGION:
            return _fault(400, "AuthorizationHeaderMalformed")
        token = request.headers.get("x-amz-security-token", "")
        if found[1] != ACCESS or (self.token and not token):
            return _fault(403, "InvalidAccessKeyId")
        if token != self.token:
            return _fault(400, "InvalidToken")
        at = datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        if self.keeps_time and abs(at - time.time()) > SKEW_S_MAX:
            return _fault(403, "RequestTimeTooSkewed")
        return None if _proven(request, found) else _fault(403, "SignatureDoesNotMatch")


def _proven(request: web.Request, found: re.Match[str]) -> bool:
    _, day, region, names, signature = found.groups()
    if request.headers.get("Range") and "range" not in names.split(";"):
        return False
    path, _, query = request.raw_path.partition("?")
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    asked = [request.method, path, "&".join(f"{quote(a, safe='-_.~')}={quote(b, safe='-_.~')}" for a, b in pairs)]
    asked += [f"{name}:{request.headers[name].strip()}" for name in names.split(";")]
    asked += ["", names, hashlib.sha256(b"").hexdigest()]
    text = ["AWS4-HMAC-SHA256", request.headers["x-amz-date"], f"{day}/{region}/s3/aws4_request"]
    text.append(hashlib.sha256("\n".join(asked).encode()).hexdigest())
    key = b"AWS4" + SECRET.encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, "\n".join(text).encode(), "sha256").hex() == signature


def _fault(status: int, code: str) -> web.Response:
    """An error response with the region of the bucket, as MinIO sends it with each response."""
    headers = {"x-amz-bucket-region": REGION}
    text = f"<Error><Code>{code}</Code><Message>words of its own</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml", headers=headers)
