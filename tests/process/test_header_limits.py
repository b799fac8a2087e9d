"""Headers of weight files made to exhaust memory or time: each is read or refused within bounds, in its own process.

The bounds are 64 MiB and twice the header, at most 200 MiB, above what the interpreter and the readers need.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from artifacts.gguf import TEXTS_MAX

pytestmark = pytest.mark.standard

READ = """
import json, re, sys, time
from pathlib import Path
from artifacts import gguf, hfconfig
def peak():  # of this program: ru_maxrss includes the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
before, begin_s = peak(), time.process_time()
path = Path(sys.argv[1])
try:
    (hfconfig if path.is_dir() else gguf).read(path)
    fault = ""
except (gguf.GgufError, hfconfig.ConfigError) as error:
    fault = str(error)
print(json.dumps({"error": fault, "mib": peak() - before, "cpu_s": time.process_time() - begin_s}))
"""
CPU_S_MAX = 6.0
"""The bound is 2 s on a machine with a free core; CI may have a third of one."""
STRING, ARRAY, U16, BOOL = 8, 9, 2, 7


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def begin(tensors: int, keys: int) -> bytes:
    architecture = text(b"general.architecture") + struct.pack("<I", STRING) + text(b"llama")
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + architecture


def arrays(name: str) -> Iterator[bytes]:
    """8,000 arrays of 4,096 numbers."""
    row = struct.pack("<IIQ", ARRAY, U16, 4096) + struct.pack("<4096H", *range(300, 4396))
    yield begin(0, 8_001)
    for number in range(8_000):
        yield text(name.format(number).encode()) + row


def texts(count: int) -> Iterator[bytes]:
    """An array of empty texts."""
    yield begin(0, 2) + text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, count)
    for _ in range(count // 100_000):
        yield bytes(800_000)


def keys(name: str, padding: int) -> Iterator[bytes]:
    """As many keys as are allowed."""
    yield begin(0, 100_000)
    for number in range(99_999):
        yield text(name.format(number).encode() + b"x" * padding) + struct.pack("<IB", BOOL, 1)


def tensors(count: int) -> Iterator[bytes]:
    """Tensors without a name."""
    yield begin(count, 1)
    yield (text(b"") + struct.pack("<IIQ", 0, 0, 0)) * count


GGUF: dict[str, Callable[[], Iterable[bytes]]] = {
    "arrays of many architectures": lambda: arrays("k{}.attention.head_count"),
    "arrays of unused keys": lambda: arrays("llama.k{}.attention.head_count"),
    "as many texts as are allowed": lambda: texts(TEXTS_MAX),
    "more texts": lambda: texts(TEXTS_MAX + 100_000),
    "long keys": lambda: keys("key-{}-", 1_000),
    "keys of many architectures": lambda: keys("k{}.block_count", 0),
    "as many tensors as are allowed": lambda: tensors(100_000),
    "more tensors": lambda: tensors(1_000_000),
}
REFUSED = {
    "arrays of many architectures": "more than 16 arrays", "more texts": "texts; at most",
    "more tensors": "tensors; at most", "as many tensors as are allowed": "truncated: its last tensor",
    "keys of many architectures": "more than 1000 keys",
}  # fmt: skip
_OFFSETS = b'{"data_offsets":[0,0]}'
SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "empty lists in the metadata": lambda: b'{"__metadata__":[' + b"[]," * 20_000_000 + b"[]]}",
    "many tensors": lambda: b"{" + b",".join(b'"%x":%b' % (n, _OFFSETS) for n in range(1_500_000)) + b"}",
    "allowed tensors": lambda: b"{" + b",".join(b'"%x":%b' % (n, _OFFSETS) for n in range(190_000)) + b"}",
    "a long text": lambda: b'{"__metadata__":{"a":"' + b"x" * 60_000_000 + b'"},"b":' + _OFFSETS + b"}",
}
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "max_position_embeddings": 8}


def read(path: Path) -> tuple[str, float, float]:
    """What a process says that reads it: (error, MiB, seconds of CPU)."""
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    return str(result["error"]), float(result["mib"]), float(result["cpu_s"])


def within(header_bytes: int) -> float:
    """MiB that a header of this size may need."""
    return min(200.0, 64 + 2 * header_bytes / (1 << 20))


@pytest.mark.parametrize("case", GGUF)
def test_a_gguf_header_is_bounded(tmp_path: Path, case: str) -> None:
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.writelines(GGUF[case]())
    said, mib, cpu_s = read(path)
    header_bytes = path.stat().st_size
    path.unlink()  # pytest keeps folders of several runs
    assert REFUSED.get(case, "block_count is missing") in said
    assert mib < within(header_bytes)
    assert cpu_s < CPU_S_MAX


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_safetensors_header_is_bounded(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    header = SAFETENSORS[case]()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    said, mib, cpu_s = read(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    allowed = case in {"allowed tensors", "a long text"}
    assert said == "" if allowed else "more than 1000000 values" in said
    assert mib < within(len(header))
    assert cpu_s < CPU_S_MAX


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_lists_without_end_in_a_config_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text('{"a":[' + "[]," * 1_300_000 + "[]]}")
    said, mib, cpu_s = read(tmp_path)
    assert "values" in said
    assert mib < within(4 << 20)
    assert cpu_s < CPU_S_MAX
