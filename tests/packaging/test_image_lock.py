"""The lock of the image's Debian packages, and the image's bill of materials."""

from __future__ import annotations

import json
from email.message import Message
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from scripts import image, sbom
from scripts.image import Deb, LockError
from scripts.sbom import Package

A, B = Deb("amd64", "a", "1:2.0-1", 64 * "a"), Deb("amd64", "b", "1", 64 * "b")
SCHEMA = Path(__file__).parents[1] / "contracts" / "cyclonedx-1.4.schema.json"
"""CycloneDX's own (Apache-2.0), https://cyclonedx.org/schema/bom-1.4.schema.json."""


def test_lock_contains_every_image_package_once() -> None:
    found = image.read_lock(image.LOCK.read_text())
    for machine in {one.architecture for one in found}:
        names = [one.name for one in found if one.architecture == machine]
        assert set(image.DEBS.split(",")) <= set(names)
        assert len(names) == len(set(names))


@pytest.mark.parametrize("text", ["", "# amd64 a 1 x\n", "amd64 a 1 abc\n", f"amd64 a 1 {64 * 'A'}\n"])
def test_image_lock_line_without_a_valid_sha256_is_rejected(text: str) -> None:
    with pytest.raises(
        LockError, match=r"requirements/debian\.lock has a line without a SHA-256, .*: run `make lock-image`"
    ):
        image.read_lock(text)


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ([A, B], ""),
        ([B, A], ""),
        ([A], "b is locked but was not installed"),
        ([A, B, Deb("amd64", "c", "3", 64 * "c")], "c 3 is not in the lock"),
        ([A, B._replace(version="2")], "b has version 2, but 1 in the lock"),
        ([A._replace(sha256=64 * "f"), B], "a 1:2.0-1 has another SHA-256 than in the lock"),
    ],
)
def test_differences_between_installed_packages_and_lock_are_described(found: list[Deb], difference: str) -> None:
    assert image.differences([A, B], found) == difference


def test_debian_package_that_differs_from_the_lock_fails_the_image_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build fails before it takes any of the package into the image."""
    locked = tmp_path / "debian.lock"
    locked.write_text(image.LOCK_HEAD + f"{' '.join(A._replace(architecture=image.architecture()))}\n")
    monkeypatch.setattr(image, "ROOT", tmp_path)
    monkeypatch.setattr(image, "LOCK", locked)
    asked = list[str]()

    def extracted(_: Path, packages: list[str]) -> list[Deb]:
        asked.extend(packages)
        return [A._replace(sha256=64 * "f")]

    monkeypatch.setattr(image, "extracted", extracted)
    with pytest.raises(
        LockError, match=r"debian\.lock: a 1:2\.0-1 has another SHA-256 than in the lock: run `make lock-image`"
    ):
        image.debian(tmp_path / "base")
    assert asked == ["a=1:2.0-1"]
    assert not (tmp_path / "base").exists()
    locked.write_text(image.LOCK_HEAD + f"{' '.join(A._replace(architecture='other'))}\n")
    with pytest.raises(LockError, match=r"debian\.lock has no packages of .*: run `make lock-image` here"):
        image.debian(tmp_path / "base")


def bill(*packages: Package) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sbom.document(packages, "0.1.0", f"sha256:{64 * '0'}", 1_700_000_000))
    return found


PACKAGES = (
    Package("deb", "libstdc++6", "12.2.0-14+deb12u1", 64 * "a", ("GPL-3", "MIT"), "amd64"),
    Package("pypi", "PyYAML_x", "6.0", 64 * "b", ("MIT",)),
    Package("pypi", "odd", "1!2", 64 * "c"),
)


def test_generated_sbom_is_a_valid_cyclonedx_document() -> None:
    anything = Resource.from_contents({}, default_specification=DRAFT7)
    base = "http://cyclonedx.org/schema/"
    others = [(f"{base}{name}", anything) for name in ("spdx.SNAPSHOT.schema.json", "jsf-0.82.SNAPSHOT.schema.json")]
    schema = json.loads(SCHEMA.read_text())
    checker = jsonschema.Draft7Validator(schema, registry=Registry().with_resources(others))
    checker.validate(bill(*PACKAGES))
    with pytest.raises(jsonschema.ValidationError):
        checker.validate({**bill(*PACKAGES), "specVersion": 1.4})


def test_sbom_component_contains_url_hash_and_licences() -> None:
    components = bill(*PACKAGES)["components"]
    assert [one["purl"] for one in components] == [
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64", "pkg:pypi/odd@1%212", "pkg:pypi/pyyaml-x@6.0",
    ]  # fmt: skip
    assert components[0]["hashes"] == [{"alg": "SHA-256", "content": 64 * "a"}]
    assert [one["license"]["name"] for one in components[0]["licenses"]] == ["GPL-3", "MIT"]
    assert [one["license"]["name"] for one in components[1]["licenses"]] == ["NOASSERTION"]


def test_sbom_does_not_depend_on_package_order() -> None:
    first, second = (sbom.document(order, "1", "sha256:0", 1) for order in (PACKAGES, PACKAGES[::-1]))
    assert first == second


def test_debian_licences_are_read_from_machine_readable_files_only() -> None:
    head = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
    text = "\nFiles: *\nLicense: Apache-2.0\n text\n\nLicense: MIT \nLicense:\n"
    assert sbom.debian_licences(head + text) == ("Apache-2.0", "MIT")
    assert sbom.debian_licences(text) == ()


@pytest.mark.parametrize(
    ("fields", "licences"),
    [
        ({"License-Expression": "Apache-2.0 AND MIT", "License": "x"}, ("Apache-2.0 AND MIT",)),
        ({"License": "MIT"}, ("MIT",)),
        ({"License": 100 * "x", "Classifier": "License :: OSI Approved :: BSD License"}, ("BSD License",)),
        ({"Classifier": "Typing :: Typed"}, ()),
    ],
)
def test_python_licences_are_read_from_package_metadata(fields: dict[str, str], licences: tuple[str, ...]) -> None:
    message = Message()
    for name, value in fields.items():
        message[name] = value
    assert sbom.python_licences(message) == licences
