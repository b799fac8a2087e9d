"""A fake Hugging Face Hub on loopback, with a second origin for large files: API, redirects, gates and error codes.

Shapes: `huggingface_hub` 2.4 (`hf_api.py`: revision, tree; `file_download.py`: resolve; `_http.py`: X-Error-Code).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from tests.support.fakes.registry import FakeRegistry

TOKEN = "hf_s3cretOfSomebody"
COMMIT = "c0ffee" + "0" * 34
PAGE = 3
"""Rows per page of the tree."""


def git_sum(content: bytes) -> str:
    """The hash that git uses as the name of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class FakeHub(FakeRegistry):
    """One repository, `acme/tiny`; the files in `large` are stored with LFS and served at `cdn`."""

    def __init__(self, small: dict[str, bytes], large: dict[str, bytes]) -> None:
        super().__init__()
        self.small, self.large = small, large
        self.name = "acme/tiny"
        self.commits = {"main": COMMIT, "refs/pr/4": "d" * 40, COMMIT: COMMIT}
        self.cdn = FakeRegistry()
        self.gated: bool | str = False
        self.private = False
        self.cdn.always = _Always(self._bytes)

    @contextlib.asynccontextmanager
    async def both(self) -> AsyncIterator[FakeHub]:
        async with self.serving(), self.cdn.serving():
            yield self

    def env(self, token: str = "") -> dict[str, str]:
        return {"HF_ENDPOINT": self.url} | ({"HF_TOKEN": token} if token else {})

    def _may(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {TOKEN}"

    async def _ordinary(self, request: web.Request) -> web.StreamResponse:
        path = unquote(request.raw_path.partition("?")[0])
        api, files = f"/api/models/{self.name}/", f"/{self.name}/resolve/"
        if self.private and not self._may(request):
            return _refused(401, "RepoNotFound")
        if path.startswith(f"{api}revision/"):
            commit = self.commits.get(path.removeprefix(f"{api}revision/"))
            if commit is None:
                return _refused(404, "RevisionNotFound")
            info = {"id": self.name, "sha": commit, "private": self.private, "gated": self.gated, "siblings": []}
            return web.json_response(info)
        if path.startswith(f"{api}tree/") and request.query.get("recursive") == "true":
            return self._tree(request)
        if path.startswith(files):
            return self._file(request, path.removeprefix(files))
        return _refused(401, "RepoNotFound")

    def _tree(self, request: web.Request) -> web.StreamResponse:
        rows: list[dict[str, Any]] = [{"type": "directory", "oid": "e" * 40, "size": 0, "path": "sub"}]
        rows += [
            {"type": "file", "oid": git_sum(content), "size": len(content), "path": path}
            for path, content in sorted(self.small.items())
        ]
        for path, content in sorted(self.large.items()):
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            rows.append({"type": "file", "oid": "f" * 40, "size": len(content), "path": path, "lfs": lfs})
        at = int(request.query.get("cursor", "0"))
        more = f'<{self.url}{request.path}?recursive=true&cursor={at + PAGE}>; rel="next"'
        return web.json_response(rows[at : at + PAGE], headers={"Link": more} if at + PAGE < len(rows) else {})

    def _file(self, request: web.Request, rest: str) -> web.StreamResponse:
        if self.gated and not self._may(request):
            return _refused(401, "GatedRepo")
        revision, _, path = rest.partition("/")
        if revision not in self.commits:
            return _refused(404, "RevisionNotFound")
        if path in self.large:
            to = f"{self.cdn.url}/{hashlib.sha256(self.large[path]).hexdigest()}?X-Signature=presigned"
            return web.Response(status=302, headers={"Location": to, "X-Repo-Commit": self.commits[revision]})
        if path not in self.small:
            return _refused(404, "EntryNotFound")
        return ranged(request, self.small[path])

    async def _bytes(self, request: web.Request) -> web.StreamResponse:
        digits = request.path.removeprefix("/")
        found = next((one for one in self.large.values() if hashlib.sha256(one).hexdigest() == digits), None)
        return _refused(404, "EntryNotFound") if found is None else ranged(request, found)


def ranged(request: web.Request, content: bytes, headers: dict[str, str] | None = None) -> web.Response:
    """Supports closed ranges."""
    found = request.http_range
    if found.start is None:
        return web.Response(body=content, headers=headers)
    end = min(found.stop or len(content), len(content))
    fields = {"Content-Range": f"bytes {found.start}-{end - 1}/{len(content)}", **(headers or {})}
    return web.Response(status=206, body=content[found.start : end], headers=fields)


def _refused(status: int, code: str) -> web.Response:
    return web.json_response({"error": "words of its own"}, status=status, headers={"X-Error-Code": code})


class _Always(dict[tuple[str, str], Any]):
    """Maps every path to the same response."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: tuple[str, str]) -> Any:
        return self._answer
