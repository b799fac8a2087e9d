"""Reads the GGUF header: the model's name, and the values that determine its memory. I/O.

Only the header is read: a model of 40 GB is known after a few MiB. This is a custom reader because the `gguf` package
creates an object per vocabulary token; here arrays are skipped. Files are untrusted: every length is checked against a
limit or the file size before use, and no allocation depends on an unchecked number. Memory use is a few MiB for any
header: a window of the file and the needed keys. Raises GgufError with one line that names the file and the fault.
`artifacts.formats.gguf_shape` derives the memory from the keys.

A vocabulary of 150,000 tokens with its 280,000 merges takes 35 ms: read a file once, not at every start.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

import msgspec

from artifacts import file_kinds
from artifacts.formats import gguf_shape
from artifacts.formats.cpu_time_limit import OVERTIME, CpuTime
from artifacts.formats.gguf_shape import LAYERS_MAX, Value
from artifacts.formats.magic import open_regular_file
from artifacts.formats.memory_estimate import Shape

HEADER_BYTES_MAX = 256 << 20
"""The largest vocabularies need about 20 MiB."""
CHUNK_BYTES = 1 << 20
KEYS_MAX = 100_000
TENSORS_MAX = 100_000
PROJECTOR, PROJECTORS_ARCHITECTURE = "mmproj", "clip"
"""Value of `general.type` of a vision projector, and its architecture. Older projectors have no `general.type`."""
INPUT, OUTPUT = "token_embd.weight", "output.weight"
"""Tensors of the input embedding and of the output. Without an output tensor, the input embedding computes the output.
"""
TEXTS_MAX = 4_000_000
"""Limit for all string arrays together. The largest vocabularies have 300,000 tokens and 500,000 merges."""
KEPT_MAX, ARRAYS_MAX = 1_000, 16
"""Maximum number of keys and arrays kept; above what any architecture has."""
TEXT_KEYS = ("general.name", "general.architecture", "general.type")
"""Keys whose texts are kept."""
KEY_BYTES_MAX = 65_535
TEXT_BYTES_MAX, NAME_CHARS_MAX = 1 << 20, 200
"""Limits of strings that are read, such as the name; others are skipped, however long."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
TENSOR_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
"""Type of a tensor -> (elements, bytes) of a block. The size of other types is unknown."""
_U64 = struct.Struct("<Q")


class GgufError(Exception):
    """The file is not a servable GGUF; the message is one line that begins with its path."""


class NotAModelError(GgufError):
    """The file is a complete GGUF file of another kind."""

    def __init__(self, path: str, kind: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.kind = kind
        """The value of `general.type`."""


OTHER_KINDS = {
    "adapter": "a LoRA adapter, not a model: list it in spec.adapters of a Model",
    "imatrix": "an importance matrix for quantization, not a model",
    PROJECTOR: "a vision projector, not a model: pass it to its model with --mmproj",
}


class GgufInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the header. All strings are printable."""

    name: str
    architecture: str
    shape: Shape


def load_gguf_info(file: Path | str, cpu: CpuTime | None = None) -> GgufInfo:
    """Read a GGUF file; for a split model pass its first part, the others are found. `cpu`: limit of all headers of an
    artifact. Raises GgufError.
    """
    path, cpu = str(file), cpu or CpuTime()
    try:
        with cpu.spend(), open_regular_file(path) as opened:
            header = _Header(path, opened, Path(path).stat().st_size, cpu)
            metadata = header.metadata()
        weights_bytes = _weights_bytes(path)
    except (OSError, ValueError) as error:  # ValueError: the path contains NUL
        raise GgufError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return _info(path, metadata, weights_bytes, header.embedding_bytes)


def has_whole_header(file: Path, known_bytes: int, cpu: CpuTime) -> bool:
    """Return whether the first `known_bytes`, behind which the file has a hole, contain its header including the tensor
    directory. Raises OSError, and GgufError for a fault that the hole does not explain.
    """
    with cpu.spend(), open_regular_file(file) as opened:
        header = _Header(str(file), opened, file.stat().st_size, cpu)
        try:
            header.metadata()
        except GgufError:
            if header.at <= known_bytes or cpu.is_spent():
                raise
        return header.at <= known_bytes


def get_model_stem(file: Path) -> str:
    """Return the file name without `.gguf` and, for a split model, without the part number."""
    split = file_kinds.PART.fullmatch(file.name)
    return split[1] if split else file.stem


def is_first_part(file: Path) -> bool:
    """Whether `load_gguf_info` accepts the file: it is complete or the first part of a split model."""
    split = file_kinds.PART.fullmatch(file.name)
    return split is None or int(split[2]) == 1


def list_base_files(paths: Iterable[str]) -> list[str]:
    """Return the files that an engine can load as a model, without later parts and adapters."""
    adapters = ("adapter", "lora", "mmproj")
    found = [one for one in paths if one.endswith(".gguf") and is_first_part(Path(one))]
    return [one for one in found if not any(word in Path(one).name for word in adapters)] or found


def check_parts(first: Path) -> None:
    """Check that the later parts of a split model are complete. Raises GgufError and OSError."""
    split = file_kinds.PART.fullmatch(first.name)
    if split is None:
        return
    cpu = CpuTime()
    for part in range(2, 1 + int(split[3])):
        path = first.with_name(f"{split[1]}-{part:05}-of-{split[3]}.gguf")
        with cpu.spend(), open_regular_file(path) as opened:
            _Header(str(path), opened, path.stat().st_size, cpu).metadata()


def _info(path: str, metadata: dict[str, Value], weights_bytes: int, embedding_bytes: int) -> GgufInfo:
    kind = metadata.get("general.type")
    if kind is None and metadata.get("general.architecture") == PROJECTORS_ARCHITECTURE:
        kind = PROJECTOR
    if isinstance(kind, str) and kind in OTHER_KINDS:
        raise NotAModelError(path, kind, OTHER_KINDS[kind])
    try:
        shape = gguf_shape.read_shape(metadata, weights_bytes, embedding_bytes)
    except ValueError as error:
        raise GgufError(f"{path}: {error}") from None
    name = metadata.get("general.name")
    return GgufInfo(
        name=name if isinstance(name, str) and _is_name(name) else get_model_stem(Path(path)),
        architecture=str(metadata["general.architecture"]),
        shape=shape,
    )


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_CHARS_MAX and name.isprintable()


def _weights_bytes(path: str) -> int:
    """Return the size of the file, or of all parts. Raises GgufError that names the first missing part."""
    split = file_kinds.PART.fullmatch(Path(path).name)
    if split is None:
        return Path(path).stat().st_size
    begin, number, count = split[1], int(split[2]), int(split[3])
    if number != 1:
        raise GgufError(f"{path}: part {number} of {count}; use the first, {begin}-00001-of-{split[3]}.gguf")
    total = 0
    for part in range(1, count + 1):
        file = Path(path).with_name(f"{begin}-{part:05}-of-{split[3]}.gguf")
        if not file.is_file():
            raise GgufError(f"{path}: part {part} of {count} is missing: {file.name}")
        total += file.stat().st_size
    return total


class _Header:
    """A cursor over the start of the file, read in chunks as needed."""

    def __init__(self, path: str, file: FileIO, size: int, cpu: CpuTime) -> None:
        self.path, self.file, self.size, self.cpu = path, file, size, cpu
        self.buffer = bytearray()
        self.base = self.at = 0
        """File offset of the buffer, and of the cursor."""
        self.texts = self.arrays = self.embedding_bytes = 0

    def metadata(self) -> dict[str, Value]:
        """Return the needed keys; of the vocabulary only its length. Also checks the tensor directory."""
        if self.size < 4 or self.bytes(4) != b"GGUF":
            raise GgufError(f"{self.path}: not a GGUF file")
        version = self.number("<I")
        if version & 0xFFFF == 0:
            raise GgufError(f"{self.path}: big-endian GGUF; convert it to little endian")
        if version not in (2, 3):
            raise GgufError(f"{self.path}: GGUF version {version}; expected 2 or 3")
        tensors = self.count("tensors", TENSORS_MAX)
        found: dict[str, Value] = {}
        for _ in range(self.count("keys", KEYS_MAX)):
            self.limit_time()
            key = self.text(KEY_BYTES_MAX)
            value = self.value(key)
            if value is not None:
                found[key] = value
                if len(found) > KEPT_MAX:
                    raise GgufError(f"{self.path}: more than {KEPT_MAX} metadata keys that describe the model")
        self.directory(tensors)
        return found

    def value(self, key: str) -> Value | None:
        """Read the value at the cursor; return it if it is needed, else None."""
        kind = self.number("<I")
        wanted = gguf_shape.is_known_key(key)
        if kind == _STRING:
            if key in TEXT_KEYS:
                return self.text(TEXT_BYTES_MAX)
            self.skip(self.number("<Q"))
            return None
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise GgufError(f"{self.path}: {key[:80]!r} has unknown type {kind}")
        value = struct.unpack(_SCALARS[kind], self.bytes(struct.calcsize(_SCALARS[kind])))[0]
        return value if wanted and isinstance(value, int | float) else None

    def array(self, key: str) -> Value | None:
        """Read an array; return its numbers (one per block) or the vocabulary's length if needed, else None."""
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            self.skip_texts(count)
            return count if key == "tokenizer.ggml.tokens" else None
        if kind not in _SCALARS:
            raise GgufError(f"{self.path}: {key[:80]!r} is an array of unknown type {kind}")
        width = struct.calcsize(_SCALARS[kind])
        if gguf_shape.is_known_key(key) and count <= LAYERS_MAX and kind not in (6, 12):
            self.arrays += 1
            if self.arrays > ARRAYS_MAX:
                raise GgufError(f"{self.path}: more than {ARRAYS_MAX} metadata arrays that have one number per block")
            return tuple(n for (n,) in struct.iter_unpack(_SCALARS[kind], self.bytes(width * count)))
        self.skip(width * count)
        return None

    def skip_texts(self, count: int) -> None:
        """Skip `count` strings. The only long loop (150,000 tokens), so it is kept tight."""
        self.check(self.at + 8 * count)
        self.texts += count
        if self.texts > TEXTS_MAX:
            raise GgufError(f"{self.path}: claims {self.texts} texts; at most {TEXTS_MAX} are read")
        unpack = _U64.unpack_from
        while count:
            self.limit_time()
            self.fill(self.at + 8)
            buffer, at, last = self.buffer, self.at - self.base, len(self.buffer) - 8
            while count and at <= last:
                at += 8 + unpack(buffer, at)[0]
                count -= 1
            self.at = self.base
            self.skip(at)

    def directory(self, tensors: int) -> None:
        """Check the tensor directory: every tensor must be within the file, unlike in an incomplete download. Also
        finds the size of the input embedding, unless that tensor computes the output, too.
        """
        begins = dict[str, int]()
        offsets, end = [0], 0
        for _ in range(tensors):
            self.limit_time()
            name = self.text(KEY_BYTES_MAX)
            dimensions = self.number("<I")
            if dimensions > 4:
                raise GgufError(f"{self.path}: a tensor of {dimensions} dimensions")
            *lengths, kind, offset = struct.unpack(f"<{dimensions}QIQ", self.bytes(8 * dimensions + 12))
            elements, size = TENSOR_BLOCKS.get(kind, (1, 0))
            offsets.append(offset)
            end = max(end, offset + math.prod(lengths) // elements * size)
            if name in (INPUT, OUTPUT):
                begins[name] = offsets[-1]
        if tensors and self.at + max(offsets) >= self.size:
            raise GgufError(f"{self.path}: truncated: its last tensor begins behind the end of the file")
        if self.at + end > self.size:
            raise GgufError(f"{self.path}: truncated: its last tensor ends behind the end of the file")
        if len(begins) == 2:
            ends = (offset for offset in (*offsets, self.size - self.at) if offset > begins[INPUT])
            self.embedding_bytes = min(ends) - begins[INPUT]

    def limit_time(self) -> None:
        """Raise GgufError if the CPU time is spent."""
        if self.cpu.is_spent():
            raise GgufError(f"{self.path}: {OVERTIME}")

    def count(self, what: str, most: int) -> int:
        """Read a count and check its limit."""
        count = self.number("<Q")
        if count > most:
            raise GgufError(f"{self.path}: claims {count} {what}; at most {most} are read")
        return count

    def text(self, most: int) -> str:
        """Read a string of at most `most` bytes."""
        length = self.number("<Q")
        if length > most:
            raise GgufError(f"{self.path}: a name of {length} bytes; at most {most} are read")
        return self.bytes(length).decode(errors="replace")

    def number(self, form: str) -> int:
        """Read an unsigned integer."""
        return int(struct.unpack(form, self.bytes(struct.calcsize(form)))[0])

    def bytes(self, count: int) -> bytes:
        """Read the next bytes."""
        self.fill(self.at + count)
        begin = self.at - self.base
        self.at += count
        return bytes(self.buffer[begin : begin + count])

    def skip(self, count: int) -> None:
        """Advance the cursor within the file."""
        self.check(self.at + count)
        self.at += count

    def check(self, end: int) -> None:
        """Raise GgufError if `end` is beyond the file or the limit."""
        if end > self.size:
            raise GgufError(f"{self.path}: truncated: its header ends behind the end of the file")
        if end > HEADER_BYTES_MAX:
            raise GgufError(f"{self.path}: its header is larger than {HEADER_BYTES_MAX >> 20} MiB")

    def fill(self, end: int) -> None:
        """Read until the buffer holds the bytes from the cursor to `end`; earlier bytes are dropped."""
        if self.at >= self.base and end <= self.base + len(self.buffer):
            return
        self.check(end)
        if self.at <= self.base + len(self.buffer):
            del self.buffer[: self.at - self.base]
        else:
            self.buffer.clear()
            self.file.seek(self.at)
        self.base = self.at
        while (missing := end - self.base - len(self.buffer)) > 0:
            chunk = self.file.read(max(CHUNK_BYTES, missing))
            if not chunk:
                raise GgufError(f"{self.path}: it became shorter while it was read")
            self.buffer += chunk
