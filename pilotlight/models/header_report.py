"""Memory facts in the headers of remote artifacts: read by agents, sent as text, and decoded for planning. I/O.

Encodes and decodes this text, which other modules pass on unchanged. Only a few MiB are requested of a model that is on
no node, whatever its size (`artifacts.fetch.remote_header`), and nothing is kept on disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from artifacts import file_kinds as kinds
from artifacts.archives.tar_reader import BadArchiveError
from artifacts.dialects.artifact_contents import File
from artifacts.fetch import remote_header
from artifacts.formats import gguf, hf_config
from artifacts.formats.cpu_time_limit import CpuTime
from artifacts.formats.gguf import GgufError
from artifacts.formats.hf_config import ConfigError
from artifacts.formats.memory_estimate import Shape
from artifacts.registry.blobs import BlobSource
from autoscaler.agent_contract import OWN, WeightsReport, WeightsRequest, collect_weights_requests
from autoscaler.contract import make_decoder
from autoscaler.spec.model import Model
from pilotlight.models.model_memory import Known, has_fixed_memory

CHARS_MAX = 100_000
"""Maximum length of the text; a model of 100 layers takes 10,000."""
NAME_CHARS_MAX = 80
"""Maximum length of the architecture's name, which the artifact chooses."""
NONE = "it has neither exactly one uncompressed GGUF file nor a config.json"


class Header(msgspec.Struct, frozen=True):
    """The facts as they are sent."""

    words: str
    shape: Shape


_decode = make_decoder(Header)


async def fetch_header_report(
    files: Sequence[File], repository: str, source: BlobSource, folder: Path
) -> dict[str, str | int]:
    """Return memory fields of a WeightsReport, or the reason for none. `folder`: temporary. Raises RegistryError."""
    adapters = kinds.list_adapters(one.path for one in files)
    sizes = {one.path: one.size for one in files}
    laid_over = kinds.adapter_bytes(sizes, adapters[0]) if len(adapters) == 1 else 0
    try:
        header = await _read(files, repository, source, folder)
    except (GgufError, ConfigError, BadArchiveError, OSError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        return {"no_header": (said or type(error).__name__).replace(f"{folder}/", ""), "bytes": laid_over}
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    if header is None:
        return {"no_header": NONE, "bytes": laid_over}
    text = msgspec.json.encode(header).decode()
    if len(text) > CHARS_MAX:
        return {"no_header": "its header is too large for an agent's report", "bytes": laid_over}
    return {"header": text, "bytes": laid_over}


async def _read(files: Sequence[File], repository: str, source: BlobSource, folder: Path) -> Header | None:
    """Return the header, or None if the artifact has none."""
    cpu = CpuTime()
    bases = gguf.list_base_files(await remote_header.fetch_gguf_headers(files, repository, source, folder, cpu))
    if len(bases) == 1:
        info = await asyncio.to_thread(gguf.load_gguf_info, folder / bases[0], cpu)
        return Header(f"Its GGUF header ({info.architecture[:NAME_CHARS_MAX]})", info.shape)
    if bases or not await remote_header.fetch_config_header(files, repository, source, folder, cpu):
        return None
    config = await asyncio.to_thread(hf_config.load_config_info, folder, cpu)
    return Header(f"Its config.json ({config.architecture})", config.shape)


def find_own_report(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> WeightsReport | None:
    """Return an agent's report about the Model's own weights, or None if it was not inspected."""
    own = collect_weights_requests(model).get(OWN)
    return None if own is None else looked.get(own._replace(look=True))


def list_reports(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> tuple[WeightsReport | None, ...]:
    """Return agents' reports about each part, its own weights first; None for a part that was not inspected."""
    return tuple(looked.get(request._replace(look=True)) for request in collect_weights_requests(model).values())


def is_header_pending(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> bool:
    """Return whether its memory need awaits an inspection; never for an engine that determines it by itself."""
    if (
        model.memory_bytes
        or model.spec.gpu.count == 0
        or has_fixed_memory(model)
        or OWN not in collect_weights_requests(model)
    ):
        return False
    return any(one is None or not (one.header or one.no_header) for one in list_reports(model, looked))


def find_artifact_facts(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> Known | None:
    """Return the facts that agents read, or None if there are none or parts are missing."""
    said = find_own_report(model, looked)
    if said is None or not said.header or None in list_reports(model, looked):
        return None
    try:
        header = _decode(said.header.encode())
    except msgspec.DecodeError:
        return None  # from another version, or not of a model
    laid_over = (
        looked.get(request._replace(look=True))
        for name, request in collect_weights_requests(model).items()
        if name != OWN
    )
    return Known(header.words, header.shape, sum(max(0, one.bytes) for one in laid_over if one is not None))
