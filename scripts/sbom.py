"""Writes the software bill of materials of the image: CycloneDX 1.4 in JSON. Pure.

The same packages give the same bytes: there is no serial number, and the time is the image's. Specification:
https://cyclonedx.org/docs/1.4/json/; package URLs: https://github.com/package-url/purl-spec.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from email.message import Message
from importlib.metadata import PackageMetadata
from typing import Any, NamedTuple
from urllib.parse import quote

UNKNOWN = "NOASSERTION"
"""The licence of a package that states none in a form that a program can read."""
LICENCE_CHARS_MAX = 80
_LICENCE = re.compile(r"(?m)^License:[ \t]*(\S.*?)[ \t]*$")
_FORMAT = "https?://www.debian.org/doc/packaging-manuals/copyright-format/1.0/?"


class Package(NamedTuple):
    """A part of the image."""

    kind: str
    """`deb` or `pypi`."""
    name: str
    version: str
    sha256: str
    """SHA-256 of the installed file."""
    licences: tuple[str, ...] = ()
    architecture: str = ""
    """Architecture of a Debian package."""

    @property
    def purl(self) -> str:
        """The package URL."""
        version = quote(self.version, safe="")
        if self.kind == "deb":
            return f"pkg:deb/debian/{quote(self.name, safe='')}@{version}?arch={self.architecture}"
        return f"pkg:pypi/{self.name.lower().replace('_', '-')}@{version}"


def document(packages: Iterable[Package], version: str, digest: str, epoch: int) -> bytes:
    """Return the bill of the image of this version, whose manifest has this digest; `epoch`: Unix seconds."""
    made = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    image = {
        "type": "container", "bom-ref": "image", "name": "pilotlight", "version": version,
        "purl": f"pkg:oci/pilotlight@{quote(digest, safe='')}",
        "hashes": [{"alg": "SHA-256", "content": digest.partition(":")[2]}],
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }  # fmt: skip
    parts = sorted(packages, key=lambda one: one.purl)
    bill = {
        "bomFormat": "CycloneDX", "specVersion": "1.4", "version": 1,
        "metadata": {"timestamp": made, "component": image},
        "components": [_component(one) for one in parts],
        "dependencies": [{"ref": "image", "dependsOn": [one.purl for one in parts]}],
    }  # fmt: skip
    return (json.dumps(bill, indent=1) + "\n").encode()


def _component(package: Package) -> dict[str, Any]:
    names = package.licences or (UNKNOWN,)
    return {
        "type": "library", "bom-ref": package.purl, "name": package.name, "version": package.version,
        "purl": package.purl, "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        "licenses": [{"license": {"name": name}} for name in names],
    }  # fmt: skip


def debian_licences(copyright_file: str) -> tuple[str, ...]:
    """Return the short names in a machine-readable copyright file of Debian; empty for another format."""
    if not re.search(f"(?m)^Format(-Specification)?: {_FORMAT}", copyright_file):
        return ()
    found = {one for one in _LICENCE.findall(copyright_file) if len(one) <= LICENCE_CHARS_MAX}
    return tuple(sorted(found))


def python_licences(metadata: Message | PackageMetadata) -> tuple[str, ...]:
    """Return the licences in core metadata: the SPDX expression, else the licence field, else the classifiers."""
    for field in ("License-Expression", "License"):
        text = str(metadata[field] or "").strip() if field in metadata else ""
        if text and "\n" not in text and len(text) <= LICENCE_CHARS_MAX:
            return (text,)
    classifiers = [str(one) for one in metadata.get_all("Classifier") or ()]
    return tuple(one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License ::"))
