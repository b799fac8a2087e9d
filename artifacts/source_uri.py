"""Parses the weights source in `spec.artifact` of a Model, for all URI schemes. Pure.

Implements the grammar of `file:///path`, `hf://owner/name@revision?include=PATTERN` and `s3://bucket/key`; `oci://` and
`ollama://` are parsed by `artifacts.reference`. Parsed values are safe to use in a URL (keys after quoting). Whether
the source exists is not checked.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from artifacts.reference import Reference, build_reference_error, parse_reference

TEXT_CHARS_MAX = 4096
"""Maximum length of `spec.artifact`."""
_PART = r"[A-Za-z0-9_-](?:[A-Za-z0-9_-]|\.(?!\.)){0,95}"
_HUB = re.compile(rf"(?P<name>{_PART}(?:/{_PART})?)(?:@(?P<revision>{_PART}(?:/{_PART})*))?")
_BUCKET = re.compile(r"[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]")
_KEY_BYTES_MAX = 1024
_INCLUDE = re.compile(r"[A-Za-z0-9*?\[\]!._+=@ /-]{1,512}")
INCLUDES_MAX = 16
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Hub(NamedTuple):
    """A model repository at Hugging Face or at a mirror of it."""

    name: str
    """`owner/name`, or only `name` for old models without an owner."""
    revision: str | None = None
    include: tuple[str, ...] = ()
    """`fnmatch` path patterns (* also matches /); files that match any of them are selected. Empty: all files."""

    def __str__(self) -> str:
        """Format the source as a URI."""
        revision = f"@{self.revision}" if self.revision is not None else ""
        include = f"?include={','.join(self.include)}" if self.include else ""
        return f"hf://{self.name}{revision}{include}"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit hash and therefore immutable."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


class Bucket(NamedTuple):
    """An object in an S3-compatible store, or all objects below a key that ends with /."""

    bucket: str
    key: str

    def __str__(self) -> str:
        """Format the source as a URI."""
        return f"s3://{self.bucket}/{self.key}"


class Local(NamedTuple):
    """A file or folder on the node."""

    path: str


Source = Reference | Hub | Bucket | Local


def parse_source_uri(text: str) -> Source:
    """Parse a weights source. Raises BadReferenceError."""
    scheme, found, rest = text.partition("://")
    if len(text) > TEXT_CHARS_MAX or not text.isprintable():
        raise build_reference_error(text, f"expected at most {TEXT_CHARS_MAX} characters that can be shown")
    if found and scheme in {"oci", "ollama"}:
        return parse_reference(text)
    if found and scheme == "file":
        if not rest.startswith("/") or len(rest) < 2:
            raise build_reference_error(text, "expected an absolute path such as file:///models/a.gguf")
        return Local(rest)
    if found and scheme == "hf":
        return _hub(text, rest)
    if found and scheme == "s3":
        return _bucket(text, rest)
    raise build_reference_error(text, "expected oci://, hf://, s3://, ollama:// or file:///")


def _hub(text: str, rest: str) -> Hub:
    name, asks, query = rest.partition("?")
    parts = _HUB.fullmatch(name)
    if parts is None:
        raise build_reference_error(text, "expected hf://owner/name@revision")
    include = tuple(query.removeprefix("include=").split(",")) if asks else ()
    if asks and not (query.startswith("include=") and all(_INCLUDE.fullmatch(one) for one in include)):
        raise build_reference_error(
            text, "expected path patterns, separated by commas, after ?include=, such as ?include=*Q4_K_M.gguf"
        )
    if len(include) > INCLUDES_MAX:
        raise build_reference_error(text, f"it has more than {INCLUDES_MAX} patterns")
    return Hub(parts["name"], parts["revision"], include)


def _bucket(text: str, rest: str) -> Bucket:
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise build_reference_error(
            text, "expected s3://bucket/key; a bucket has 3 to 63 lower-case letters, digits, - and single ."
        )
    parts = key.removesuffix("/").split("/")
    if {"", ".", ".."} & set(parts) or len(key.encode()) > _KEY_BYTES_MAX:
        raise build_reference_error(
            text, f"its key is empty, above {_KEY_BYTES_MAX} bytes, or has an empty part, . or .. in it"
        )
    return Bucket(bucket, key)
