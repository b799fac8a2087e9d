"""What an agent says of an artifact that it only looks at."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts import ocilayout, reference
from artifacts.obtain import Registries
from artifacts.packing import Form
from autoscaler.contract import WeightsReport
from pilotlight.looking import look
from pilotlight.packing import planned
from tests.kit import packed


async def looked(
    folder: Path, form: Form, seen: list[str] | None = None, *, allow_unsafe: bool = False
) -> WeightsReport:
    files = {"a.gguf": b"GGUF" + bytes(300_000), "LICENSE": b"free"} | ({"m.py": b"pass"} if allow_unsafe else {})
    plan = planned(packed.model(folder / "in", files), allow_unsafe=allow_unsafe)
    ocilayout.write(folder / "layout", plan, form, "v1")
    with packed.served(folder / "layout", seen) as host:
        artifact = f"oci://{host}/{packed.NAME}:v1"
        said = WeightsReport(artifact=artifact, look=True, allow_unsafe=allow_unsafe)
        return await look(said, reference.parse(artifact), Registries())


async def test_what_weights_pack_writes_is_an_image_whose_file_is_known(tmp_path: Path) -> None:
    asked = list[str]()
    found = await looked(tmp_path, "modelpack", asked)
    assert (found.image, found.no_image, found.ggufs) == ("", "", ("a.gguf",))
    assert found.digest.startswith("sha256:")
    assert any(one.endswith(found.digest) and "/manifests/" in one for one in asked), "it is the image's own manifest"


async def test_a_modelpack_alone_is_no_image(tmp_path: Path) -> None:
    found = await looked(tmp_path, "modelpack-raw")
    assert (found.image, found.no_image, found.ggufs) == (None, "it is no image (ModelPack)", ())
    assert found.digest


@pytest.mark.parametrize("allowed", [True, False])
async def test_what_is_refused_to_a_pull_is_no_image_to_be_mounted(tmp_path: Path, *, allowed: bool) -> None:
    found = await looked(tmp_path, "modelpack", allow_unsafe=True)
    if allowed:
        assert found.image == ""
        return
    with packed.served(tmp_path / "layout") as host:
        artifact = f"oci://{host}/{packed.NAME}:v1"
        found = await look(WeightsReport(artifact=artifact, look=True), reference.parse(artifact), Registries())
    assert found.image is None
    assert "code is not taken" in found.no_image
