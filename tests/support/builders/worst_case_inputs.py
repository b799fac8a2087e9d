"""Inputs made to exhaust memory or time: headers of weight files, YAML, objects of an API server.

`measure` reads one in a separate process and returns the peak. `tests/integration/process` and `bench.inputs` use it.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from artifacts.formats.gguf import TEXTS_MAX

CPU_S_MAX = 2.0
"""For any header, on a machine that runs a million empty loop turns in 10 ms; more on a slower one."""
READ = """
import asyncio, json, msgspec, re, sys, tempfile, time
from functools import partial
from pathlib import Path
from artifacts.archives.tar_reader import BadArchiveError
from artifacts.dialects.artifact_contents import File
from artifacts.fetch import remote_header
from artifacts.formats import gguf, hf_config
from artifacts.formats.cpu_time_limit import CpuTime
from autoscaler.kubernetes import safe_decoding
from autoscaler.documents import parse
from autoscaler.spec.decode import WrongKeyError
def peak():  # of this program: ru_maxrss includes the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
def read_object(path):
    try:
        _, found = safe_decoding.read_event(path.read_bytes())
    except msgspec.DecodeError as error:
        raise parse.DocumentError(str(error))
    if isinstance(found, safe_decoding.Unreadable):
        raise parse.DocumentError(found.reason)
    known = {"name": found["metadata"]["name"], "namespace": found["metadata"]["namespace"]}
    document = {"apiVersion": found["apiVersion"], "kind": "Model", "metadata": known, "spec": found["spec"]}
    return parse.read_document(document)
def read_yaml(path):
    return parse.parse_documents([("a.yaml", path.read_text())])
class Source:  # a registry that sends pieces of 256 KiB
    def __init__(self, path):
        self.path = path
    async def read(self, blob, first=0, end=None, sink=None):
        with self.path.open("rb") as file:
            file.seek(first)
            while first < end:
                piece = file.read(min(end - first, 1 << 18))
                first += len(piece)
                yield piece
def read_remote(encoding, path):
    async def fetch(folder):
        file, cpu = File("a.gguf", path.stat().st_size, "sha256:0", "weight", encoding), CpuTime()
        await remote_header.fetch_gguf_headers([file], "r", Source(path), folder, cpu)
        await asyncio.to_thread(gguf.load_gguf_info, folder / "a.gguf", cpu)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fetch(Path(folder)))
def turns_s():
    begin_s = time.process_time()
    for _ in range(1_000_000):
        pass
    return time.process_time() - begin_s
readers = {"gguf": gguf.load_gguf_info, "folder": hf_config.load_config_info, "yaml": read_yaml, "object": read_object,
           "remote raw": partial(read_remote, "raw"), "remote tar": partial(read_remote, "tar")}
read = readers[sys.argv[1]]
path = Path(sys.argv[2])
before, turned_s, begin_s = peak(), turns_s(), time.process_time()
try:
    read(path)
    fault = ""
except (gguf.GgufError, hf_config.ConfigError, parse.DocumentError, WrongKeyError, BadArchiveError) as error:
    fault = str(error)
cpu_s = time.process_time() - begin_s
print(json.dumps({"error": fault, "mib": peak() - before, "cpu_s": cpu_s, "turns_s": max(turned_s, turns_s())}))
"""
MIB_MAX = 200
"""MiB above the idle process, for any input within the limits of the product."""
YAML_BYTES, OBJECT_BYTES = 1 << 20, 3 << 19
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "max_position_embeddings": 8}


class Measured(NamedTuple):
    """The cost of reading one input."""

    error: str
    mib: float
    """Above the idle process."""
    cpu_s: float
    cpu_s_max: float
    """CPU_S_MAX, scaled to the speed of this machine before and after."""


def measure(kind: str, path: Path) -> Measured:
    """Reads the input in a separate process. `kind`: gguf, remote raw, remote tar, folder, yaml or object."""
    command = [sys.executable, "-c", READ, kind, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    result = json.loads(done.stdout)
    cpu_s_max = CPU_S_MAX * max(1.0, float(result["turns_s"]) / 0.01)
    return Measured(str(result["error"]), float(result["mib"]), float(result["cpu_s"]), cpu_s_max)


# --- headers ----------------------------------------------------------------------------------------------------------

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
    """An array of empty strings."""
    yield begin(0, 2) + text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, count)
    for _ in range(count // 100_000):
        yield bytes(800_000)


def keys(name: str, padding: int, count: int = 100_000) -> Iterator[bytes]:
    """By default as many keys as the limit allows. `name`: has a place for a number, and `x`, which is repeated."""
    yield begin(0, count)
    for number in range(count - 1):
        yield text(name.format(number, x="x" * padding).encode()) + struct.pack("<IB", BOOL, 1)


def tensors(count: int) -> Iterator[bytes]:
    """Tensors without a name."""
    yield begin(count, 1)
    yield (text(b"") + struct.pack("<IIQ", 0, 0, 0)) * count


GGUF: dict[str, Callable[[], Iterable[bytes]]] = {
    "arrays of many architectures": lambda: arrays("k{}.attention.head_count"),
    "arrays of unused keys": lambda: arrays("llama.k{}.attention.head_count"),
    "as many texts as are allowed": lambda: texts(TEXTS_MAX),
    "more texts": lambda: texts(TEXTS_MAX + 100_000),
    "long keys": lambda: keys("key-{}-{x}", 1_000),
    "keys of many architectures": lambda: keys("k{}.block_count", 0),
    "keys of architectures with long wide names": lambda: keys("\U0001f600{}{x}.block_count", 65_500, 991),
    "as many tensors as are allowed": lambda: tensors(100_000),
    "more tensors": lambda: tensors(1_000_000),
}
_OFFSETS = b'{"data_offsets":[0,0]}'


def name(start: str, header_bytes: int) -> bytes:
    """A header of about this size with one tensor, whose name begins with `start`."""
    return b'{"%b%b":%b}' % (start.encode(), b"x" * (header_bytes - 100), _OFFSETS)


def names(start: str, header_bytes: int) -> bytes:
    """A header of about this size with 200,000 tensors, whose names begin with `start`."""
    rest = b"x" * (header_bytes // 200_000 - len(start.encode()) - len(_OFFSETS) - 10)
    return b"{" + b",".join(b'"%b%06x%b":%b' % (start.encode(), n, rest, _OFFSETS) for n in range(200_000)) + b"}"


SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "empty lists in the metadata": lambda: b'{"__metadata__":[' + b"[]," * 20_000_000 + b"[]]}",
    "many tensors": lambda: b"{" + b",".join(b'"%x":%b' % (n, _OFFSETS) for n in range(1_500_000)) + b"}",
    "allowed tensors": lambda: b"{" + b",".join(b'"%x":%b' % (n, _OFFSETS) for n in range(190_000)) + b"}",
    "a long text": lambda: b'{"__metadata__":{"a":"' + b"x" * 60_000_000 + b'"},"b":' + _OFFSETS + b"}",
    "a long name": lambda: name("", 64 << 20),
    "long names": lambda: names("", 64 << 20),
    "a wide name": lambda: name("\U0001f600", 64 << 20),
    "a name with an escape": lambda: name("\\ud83d\\ude00", 64 << 20),
    "wide names": lambda: names("\U0001f600", 64 << 20),
    "an allowed wide name": lambda: name("\U0001f600", 16 << 20),
    "an allowed name with an escape": lambda: name("\\ud83d\\ude00", 12 << 20),
    "allowed wide names": lambda: names("\U0001f600", 16 << 20),
}


def archived(path: Path) -> Path:
    """Put the file into a tar archive next to it; returns the path of that archive."""
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        archive.add(path, path.name)
    return path.with_suffix(".tar")


def write_folder(folder: Path, header: bytes, files: int = 1) -> Path:
    """A folder with config.json and files of weights; returns the path of the first."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    for number in range(1, files):
        (folder / f"a{number}.safetensors").hardlink_to(path)
    return path


# --- YAML -------------------------------------------------------------------------------------------------------------


def filled(unit: str, begin: str = "", end: str = "", size: int = YAML_BYTES) -> str:
    """A text of this size that repeats `unit`."""
    return begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end


YAML: dict[str, Callable[[], str]] = {
    "short values": lambda: filled("- 1\n"),
    "short values in one line": lambda: filled("1,", "[", "]"),
    "as many values as are allowed": lambda: "- 1\n" * 99_990,
    "empty mappings": lambda: "[" + "{}," * 99_990 + "]",
    "keys": lambda: "".join(f"k{number}: 1\n" for number in range(49_990)),
    "long keys": lambda: "".join(f"{'k' * 30}{number}: 1\n" for number in range(25_000)),
    "one text": lambda: filled("x", "a: "),
    "one text with escapes": lambda: filled("\\u00e9", 'a: "', '"'),
    "comments": lambda: filled("# x\n"),
    "nested lists": lambda: filled("["),
    "aliases": lambda: "a: &a []\nb: [" + "*a," * 99_000 + "]",
    "aliases of aliases": lambda: "".join(
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}' if level else '1'] * 9)}]\n" for level in range(12)
    ),
    "documents": lambda: filled("--- 1\n"),
}
"""Case -> a text of at most 1 MiB."""


# --- objects ----------------------------------------------------------------------------------------------------------


def event(spec: str = "1", metadata: str = "") -> str:
    """A watch event with a Model."""
    known = '"name":"m","namespace":"n","uid":"u","resourceVersion":"7"' + metadata
    known = f'"apiVersion":"pilotlight.dev/v1alpha1","kind":"Model","metadata":{{{known}}}'
    return f'{{"type":"ADDED","object":{{{known},"spec":{spec}}}}}'


def _affinity(unit: str, last: str) -> Callable[[], str]:
    """The API server accepts anything in `pod.affinity`."""
    return lambda: event(filled(unit, '{"engine":"vllm","pod":{"affinity":{"a":[', last + "]}}}", OBJECT_BYTES - 300))


OBJECT: dict[str, Callable[[], str]] = {
    "empty objects": _affinity("{},", "{}"),
    "empty lists": _affinity("[],", "[]"),
    "objects of one member": _affinity('{"a":0},', "0"),
    "lists in lists": _affinity("[[[[]]]],", "0"),
    "short texts": _affinity('"ab",', "0"),
    "numbers": _affinity("1e5,", "0"),
    "large numbers": _affinity("9223372036854775807,", "0"),
    "nested lists": lambda: event("[" * (OBJECT_BYTES // 2 - 200) + "]" * (OBJECT_BYTES // 2 - 200)),
    "nested objects without end": lambda: event(filled('{"a":', size=OBJECT_BYTES - 400)),
    "many names": lambda: event('{"pod":{"affinity":{' + ",".join(f'"{n:x}":{{}}' for n in range(120_000)) + "}}}"),
    "annotations": lambda: event(metadata=',"annotations":{' + ",".join(f'"{n:x}":""' for n in range(140_000)) + "}"),
    "managed fields": lambda: event(
        metadata=',"managedFields":[' + filled('{"f":{}},', size=OBJECT_BYTES - 400) + "{}]"
    ),
    "one text": lambda: event(filled("x", '{"a":"', '"}', OBJECT_BYTES - 300)),
    "quotes": lambda: event(filled('\\"', '{"a":"', '"}', OBJECT_BYTES - 300)),
}
"""Case -> a watch event whose object has at most 1.5 MiB."""
