"""Hugging Face Hub, or a mirror of it: lists a model repository at one commit, and reads its files. I/O.

Uses the same API requests as `huggingface_hub`, and finds the token in the same places. The token is sent only to the
Hub's own origin, never to redirect targets. A revision is resolved to a commit first, and all later requests name that
commit. A file has the sha256 stated by the Hub (LFS), or its git hash.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from yarl import URL

from artifacts.http.transport import REDIRECT_STATUSES, CompleteResponse
from artifacts.http.url_policy import (
    REDIRECTS_MAX,
    find_next_page,
    get_origin,
    is_loopback,
    parse_untrusted_url,
    resolve_redirect,
)
from artifacts.registry_errors import PolicyError, RegistryError
from artifacts.source_uri import Hub
from artifacts.sources import file_selection as listing
from artifacts.sources.file_host_client import FileHost, Rules
from artifacts.sources.file_selection import ListedFile, Listing

ENDPOINT = "https://huggingface.co"
INFO_BYTES_MAX = 16 << 20
PAGE_BYTES_MAX = 8 << 20
PAGES_MAX = 200
ROWS_MAX = 100_000
"""Limit of a repository's entries including folders; the Hub itself recommends fewer."""
TOKEN_BYTES_MAX = 4096
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")
_TOKEN = re.compile(r"[!-~]{1,1024}")


class HubRevision(NamedTuple):
    """A repository at one commit."""

    commit: str
    listing: Listing
    open: bool
    """Whether it is publicly readable."""


class _Info(msgspec.Struct, frozen=True):
    sha: str = ""
    private: bool = True
    gated: bool | str = True


class _Lfs(msgspec.Struct, frozen=True):
    oid: str
    size: int


class _Row(msgspec.Struct, frozen=True):
    type: str
    path: str
    oid: str = ""
    size: int = 0
    lfs: _Lfs | None = None


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Access to the Hub, configured by the environment variables of its own tools."""

    env: Mapping[str, str]
    home: Path

    def endpoint(self) -> URL:
        """Return `HF_ENDPOINT`, or the Hub's URL. Raises PolicyError."""
        said = self.env.get("HF_ENDPOINT") or ENDPOINT
        try:
            return parse_untrusted_url(said.rstrip("/") + "/")
        except PolicyError:
            raise PolicyError("HF_ENDPOINT is not a URL; expected e.g. https://huggingface.co") from None

    async def token(self) -> str | None:
        """Return `HF_TOKEN`, or the token stored by `hf auth login`. Raises PolicyError."""
        said = self.env.get("HF_TOKEN") or self.env.get("HUGGING_FACE_HUB_TOKEN") or ""
        said = said or await asyncio.to_thread(self._read)
        token = said.strip()
        if token and not _TOKEN.fullmatch(token):
            raise PolicyError("the Hub's token (HF_TOKEN, or its file) has invalid characters")
        return token or None

    def _read(self) -> str:
        cache = Path(self.env["XDG_CACHE_HOME"]) if self.env.get("XDG_CACHE_HOME") else self.home / ".cache"
        home = Path(self.env["HF_HOME"]) if self.env.get("HF_HOME") else cache / "huggingface"
        path = Path(self.env["HF_TOKEN_PATH"]) if self.env.get("HF_TOKEN_PATH") else home / "token"
        with suppress(OSError, UnicodeDecodeError), path.open("rb") as file:
            return file.read(TOKEN_BYTES_MAX).decode().strip()
        return ""

    def place(self, token: str | None, rules: Rules) -> FileHost:
        """Return the Hub as a host that uses this token. Raises PolicyError."""
        base = self.endpoint()
        if token and base.scheme == "http" and not is_loopback(base.raw_host or ""):
            raise PolicyError(f"{get_origin(base)}: HF_ENDPOINT is plain HTTP, over which no token is sent; use https")

        async def prove(_method: str, _url: URL, _headers: Mapping[str, str]) -> Mapping[str, str]:
            return {"Authorization": f"Bearer {token}"} if token else {}

        return FileHost(base, prove, _explained, rules)


async def list_repository(place: FileHost, of: Hub, *, allow_unsafe: bool = False) -> HubRevision:
    """List the selected files and register them with `place` for reading. Raises RegistryError, RefusedError."""
    name, revision = quote(of.name, safe="/"), quote(of.revision or "main", safe="")
    what = f"{of.name} at revision {of.revision or 'main'}"
    found = await _asked(place, place.url(f"api/models/{name}/revision/{revision}"), INFO_BYTES_MAX, what)
    info = _read(found.body, _Info, place, what)
    if not _COMMIT.fullmatch(info.sha):
        raise RegistryError(f"{place.said}: {what}: its response has no commit")
    url: URL | None = place.url(f"api/models/{name}/tree/{info.sha}", "recursive=true")
    rows, pages = list[_Row](), 0
    while url is not None:
        if pages == PAGES_MAX or len(rows) > ROWS_MAX:
            raise RegistryError(f"{place.said}: {what}: has too many files")
        page = await _asked(place, url, PAGE_BYTES_MAX, f"list of files of {what}")
        rows += _read(page.body, list[_Row], place, what)
        url, pages = find_next_page(url, page.headers), pages + 1
    entries = [_entry(one, place, what) for one in rows if one.type == "file"]
    taken = listing.select_files(f"hf://{of.name}", entries, of.include, allow_unsafe=allow_unsafe)
    for one in taken.taken:
        place.has(one.entry.name, file_url(place, of, info.sha, one.entry.path))
    return HubRevision(info.sha, taken, open=not info.private and info.gated is False)


def file_url(place: FileHost, of: Hub, revision: str, path: str) -> URL:
    """Return the URL of a file at a revision."""
    return place.url(f"{quote(of.name, safe='/')}/resolve/{quote(revision, safe='')}/{quote(path, safe='/')}")


async def find_access_error(place: FileHost, of: Hub, path: str) -> RegistryError | None:
    """Return why the token may not read this file, or None; the Hub lists the files of gated repositories publicly.
    Raises RegistryError.
    """
    url, what = file_url(place, of, of.revision or "main", path), f"{path} of {of.name}"
    for hops in range(REDIRECTS_MAX):
        found = await place.whole("HEAD", url, bytes_max=0, what=what)
        if found.status in {401, 403, 404}:
            return place.refusal(found, what)
        if found.status == 200:
            return None
        if found.status not in REDIRECT_STATUSES:
            raise place.refusal(found, what)
        url = resolve_redirect(url, found.headers.get("Location"), "HEAD", found.status, hops)
        if get_origin(url) != place.transport.own:  # a renamed repository first redirects within the Hub
            if _COMMIT.fullmatch(found.headers.get("X-Repo-Commit", "")):
                return None  # redirected to the content: the Hub states the commit only for readable files
            raise RegistryError(f"{place.said}: {what}: it is redirected, but not to the file")
    raise RegistryError(f"{place.said}: {what}: it is redirected too often")


async def _asked(place: FileHost, url: URL, bytes_max: int, what: str) -> CompleteResponse:
    found = await place.whole("GET", url, bytes_max=bytes_max, what=what)
    if found.status != 200:
        raise place.refusal(found, what)
    return found


def _read(body: bytes, kind: type[T], place: FileHost, what: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RegistryError(f"{place.said}: its response about {what} is invalid") from None


def _entry(row: _Row, place: FileHost, what: str) -> ListedFile:
    if row.lfs is not None:
        digits = row.lfs.oid.removeprefix("sha256:")
        if _SHA256.fullmatch(digits) and row.lfs.size >= 0:
            return ListedFile(row.path, row.lfs.size, f"sha256:{digits}")
    elif _COMMIT.fullmatch(row.oid) and row.size >= 0:
        return ListedFile(row.path, row.size, f"git:{row.oid}")
    raise RegistryError(f"{place.said}: states no checksum for a file of {what}")


def _explained(status: int, headers: Mapping[str, str], _body: bytes) -> str:
    """Explain the Hub's error codes (`X-Error-Code`)."""
    code = headers.get("X-Error-Code", "")
    if code == "GatedRepo":
        return "it is gated: accept its terms on its page of the Hub, and set HF_TOKEN to a token of the user who did"
    if code == "RevisionNotFound":
        return "it has no such revision"
    if code == "RepoNotFound" or status == 401:
        return "it does not exist, or is private: set HF_TOKEN to a token that may read it"
    return "the token in HF_TOKEN may not read it" if status == 403 else ""
