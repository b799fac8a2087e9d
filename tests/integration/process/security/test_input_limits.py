"""Weight file headers made to exhaust memory or time are read or rejected within limits, each in its own process.

The memory limit is 64 MiB plus twice the header, at most 200 MiB, in addition to interpreter and readers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from artifacts.fetch import remote_header
from artifacts.formats.hf_config import FILES_MAX
from tests.support.builders.worst_case_inputs import (
    CONFIG,
    GGUF,
    MIB_MAX,
    OBJECT,
    SAFETENSORS,
    YAML,
    archived,
    measure,
    write_folder,
)

pytestmark = pytest.mark.standard

REFUSED = {
    "arrays of many architectures": "more than 16 metadata arrays", "more texts": "texts; at most",
    "more tensors": "tensors; at most", "as many tensors as are allowed": "truncated: its last tensor",
    "keys of many architectures": "more than 1000 metadata keys",
}  # fmt: skip


def within(header_bytes: int) -> float:
    """Return the MiB that a header of this size may need."""
    return min(float(MIB_MAX), 64 + 2 * header_bytes / (1 << 20))


@pytest.mark.parametrize("kind", ["gguf", "remote raw", "remote tar"])
@pytest.mark.parametrize("case", GGUF)
def test_hostile_gguf_header_is_rejected_within_memory_and_cpu_limits(tmp_path: Path, case: str, kind: str) -> None:
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.writelines(GGUF[case]())
    reported, mib, cpu_s, cpu_s_max = measure(kind, archived(path) if kind == "remote tar" else path)
    header_bytes = path.stat().st_size
    shutil.rmtree(tmp_path)  # pytest keeps folders of several runs
    too_large = kind != "gguf" and header_bytes > remote_header.BYTES_MAX and case not in REFUSED
    refused = "larger than 64 MiB" if too_large else REFUSED.get(case, "block_count is missing")
    assert refused in reported or (
        kind != "gguf" and "takes more than 2 s" in reported
    )  # several passes over one header
    assert mib < within(header_bytes)
    assert cpu_s < cpu_s_max


@pytest.mark.parametrize("case", SAFETENSORS)
def test_reading_a_hostile_safetensors_header_keeps_memory_and_cpu_limits(tmp_path: Path, case: str) -> None:
    header = SAFETENSORS[case]()
    write_folder(tmp_path, header)
    reported, mib, cpu_s, cpu_s_max = measure("folder", tmp_path)
    (tmp_path / "a.safetensors").unlink()
    allowed = {"allowed tensors", "a long text", "a long name", "long names"}
    wide = {"a wide name", "a name with an escape", "wide names"}
    if case in allowed or case.startswith(("allowed", "an allowed")):
        assert not reported
    else:
        assert ("larger than 16 MiB" if case in wide else "more than 1000000 values") in reported
    assert mib < within(len(header))
    assert cpu_s < cpu_s_max


@pytest.mark.parametrize("files", [2, FILES_MAX])
def test_folder_of_large_headers_is_read_or_rejected_within_the_cpu_limit(tmp_path: Path, files: int) -> None:
    header = SAFETENSORS["allowed tensors"]()
    write_folder(tmp_path, header, files)
    reported, mib, cpu_s, cpu_s_max = measure("folder", tmp_path)
    shutil.rmtree(tmp_path)
    assert reported == "" if files == 2 else "takes more than 2 s" in reported
    assert mib < within(len(header))
    assert cpu_s < cpu_s_max


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_config_with_over_a_million_values_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text('{"a":[' + "[]," * 1_300_000 + "[]]}")
    reported, mib, cpu_s, cpu_s_max = measure("folder", tmp_path)
    assert "values" in reported
    assert mib < within(4 << 20)
    assert cpu_s < cpu_s_max


@pytest.mark.deep
@pytest.mark.parametrize("case", YAML)
def test_reading_hostile_yaml_of_one_mib_stays_within_the_memory_limit(tmp_path: Path, case: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(YAML[case]())
    assert path.stat().st_size <= 1 << 20
    assert measure("yaml", path).mib < MIB_MAX


@pytest.mark.deep
@pytest.mark.parametrize("case", OBJECT)
def test_decoding_a_hostile_kubernetes_object_keeps_the_memory_limit(tmp_path: Path, case: str) -> None:
    path = tmp_path / "event.json"
    path.write_text(OBJECT[case]())
    assert path.stat().st_size <= 3 << 19
    assert measure("object", path).mib < MIB_MAX
