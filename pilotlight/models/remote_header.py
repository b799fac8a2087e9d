"""What headers of artifacts in registries say of memory: read by agents, told as a text, known to who plans. I/O.

Owns that text and both its ends; rooms between them pass it on. Promises: of a model that is on no node a few MiB are
asked for, whatever it weighs (`artifacts.fetch.remote_header`), and nothing of that stays on the disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from artifacts import files as kinds
from artifacts.archives.tar import BadArchiveError
from artifacts.dialects.contents import File
from artifacts.fetch import remote_header
from artifacts.formats import gguf, hf_config
from artifacts.formats.gguf import GgufError
from artifacts.formats.hf_config import ConfigError
from artifacts.formats.memory import Shape
from artifacts.registry.blobs import BlobSource
from autoscaler.agent_contract import OWN, WeightsRequest, collect_weights_requests
from autoscaler.contract import WeightsReport, make_decoder
from autoscaler.spec.model import Model
from pilotlight.models.memory import Known, has_fixed_memory

CHARS_MAX = 100_000
"""Of what is told; of a model of 100 layers it is 10,000."""
NAME_CHARS_MAX = 80
"""Of an architecture: it is the artifact's own word, and of any length there."""
NONE = "it has neither one GGUF file that is not compressed nor a config.json"


class Header(msgspec.Struct, frozen=True):
    """As it is told."""

    words: str
    shape: Shape


_decode = make_decoder(Header)


async def fetch_header_report(
    files: Sequence[File], repository: str, source: BlobSource, folder: Path
) -> dict[str, str | int]:
    """Of a WeightsReport what is known of memory, or why nothing is. `folder`: for a while. Raises RegistryError."""
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
        return {"no_header": "it says more than an agent tells", "bytes": laid_over}
    return {"header": text, "bytes": laid_over}


async def _read(files: Sequence[File], repository: str, source: BlobSource, folder: Path) -> Header | None:
    """None: there is nothing in it that says any."""
    bases = gguf.list_base_files(await remote_header.fetch_gguf_headers(files, repository, source, folder))
    if len(bases) == 1:
        info = await asyncio.to_thread(gguf.load_gguf_info, folder / bases[0])
        return Header(f"Its GGUF header ({info.architecture[:NAME_CHARS_MAX]})", info.shape)
    if bases or not await remote_header.fetch_config_header(files, repository, source, folder):
        return None
    config = await asyncio.to_thread(hf_config.load_config_info, folder)
    return Header(f"Its config.json ({config.architecture})", config.shape)


def find_own_report(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> WeightsReport | None:
    """What an agent said of its own weights; None: nobody has looked."""
    own = collect_weights_requests(model).get(OWN)
    return None if own is None else looked.get(own._replace(look=True))


def list_reports(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> tuple[WeightsReport | None, ...]:
    """What agents said of each of its parts, its own weights first; None: nobody has looked."""
    return tuple(looked.get(wish._replace(look=True)) for wish in collect_weights_requests(model).values())


def is_header_pending(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> bool:
    """Whether a look is still to say how much memory it takes: one that its engine takes by itself none does."""
    if (
        model.memory_bytes
        or model.spec.gpu.count == 0
        or has_fixed_memory(model)
        or OWN not in collect_weights_requests(model)
    ):
        return False
    return any(one is None or not (one.header or one.no_header) for one in list_reports(model, looked))


def find_artifact_facts(model: Model, looked: Mapping[WeightsRequest, WeightsReport]) -> Known | None:
    """What agents read of it; None: nothing that says more, or not of all that counts."""
    said = find_own_report(model, looked)
    if said is None or not said.header or None in list_reports(model, looked):
        return None
    try:
        header = _decode(said.header.encode())
    except msgspec.DecodeError:
        return None  # another version's, or of no model
    laid_over = (
        looked.get(wish._replace(look=True)) for name, wish in collect_weights_requests(model).items() if name != OWN
    )
    return Known(header.words, header.shape, sum(max(0, one.bytes) for one in laid_over if one is not None))
