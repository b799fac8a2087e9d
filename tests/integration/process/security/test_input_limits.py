"""Weight file headers made to exhaust memory or time are read or rejected within limits, each in its own process.

The memory limit is 64 MiB plus twice the header, at most 200 MiB, in addition to interpreter and readers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.builders.worst_case_inputs import (
    CONFIG,
    GGUF,
    MIB_MAX,
    OBJECT,
    SAFETENSORS,
    YAML,
    measure,
    write_folder,
)

pytestmark = pytest.mark.standard

CPU_S_MAX = 6.0
"""The limit is 2 s on a machine with a free core; CI may have a third of a core."""
REFUSED = {
    "arrays of many architectures": "more than 16 arrays", "more texts": "texts; at most",
    "more tensors": "tensors; at most", "as many tensors as are allowed": "truncated: its last tensor",
    "keys of many architectures": "more than 1000 keys",
}  # fmt: skip


def within(header_bytes: int) -> float:
    """Return the MiB that a header of this size may need."""
    return min(float(MIB_MAX), 64 + 2 * header_bytes / (1 << 20))


@pytest.mark.parametrize("case", GGUF)
def test_hostile_gguf_header_is_read_within_memory_and_time_limits(tmp_path: Path, case: str) -> None:
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.writelines(GGUF[case]())
    said, mib, cpu_s = measure("gguf", path)
    header_bytes = path.stat().st_size
    path.unlink()  # pytest keeps folders of several runs
    assert REFUSED.get(case, "block_count is missing") in said
    assert mib < within(header_bytes)
    assert cpu_s < CPU_S_MAX


@pytest.mark.parametrize("case", SAFETENSORS)
def test_hostile_safetensors_header_is_read_within_memory_and_cpu_limits(tmp_path: Path, case: str) -> None:
    header = SAFETENSORS[case]()
    write_folder(tmp_path, header)
    said, mib, cpu_s = measure("folder", tmp_path)
    (tmp_path / "a.safetensors").unlink()
    allowed = case in {"allowed tensors", "a long text"}
    assert said == "" if allowed else "more than 1000000 values" in said
    assert mib < within(len(header))
    assert cpu_s < CPU_S_MAX


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_config_with_over_a_million_values_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text('{"a":[' + "[]," * 1_300_000 + "[]]}")
    said, mib, cpu_s = measure("folder", tmp_path)
    assert "values" in said
    assert mib < within(4 << 20)
    assert cpu_s < CPU_S_MAX


@pytest.mark.deep
@pytest.mark.parametrize("case", YAML)
def test_hostile_yaml_of_one_mib_is_parsed_within_the_memory_limit(tmp_path: Path, case: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(YAML[case]())
    assert path.stat().st_size <= 1 << 20
    assert measure("yaml", path).mib < MIB_MAX


@pytest.mark.deep
@pytest.mark.parametrize("case", OBJECT)
def test_hostile_kubernetes_object_is_parsed_within_the_memory_limit(tmp_path: Path, case: str) -> None:
    path = tmp_path / "event.json"
    path.write_text(OBJECT[case]())
    assert path.stat().st_size <= 3 << 19
    assert measure("object", path).mib < MIB_MAX
