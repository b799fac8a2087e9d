"""The table of bounds (ARCHITECTURE.md, section 11) is what the code has: every row, every value, every error.

A bound of a gateway that is not in the table fails here: give it a row, or say below why it bounds nothing for others.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from gateway.limits import Limits
from tests.test_tidy import ROOT, SOURCES, name

GATEWAY = [path for path in SOURCES if name(path).startswith("gateway/")]
SECTION = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## 11. Bounds\n")[2].partition("\n## ")[0]
_ROW = re.compile(r"^\| (?!bound |---)([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_ERROR = re.compile(r"\b(4\d\d|5\d\d)(?: `(\w+)`(?: or `(\w+)`)?)?")
_BOUND = re.compile(r"_?(?:[A-Z]+_)*MAX(?:_[A-Z]+)*")

ROWS: dict[str, tuple[str, ...]] = {
    "request head": ("gateway.head.HEAD_BYTES_MAX", "gateway.head.HEADERS_MAX"),
    "head for the engine": ("gateway.admission.UPSTREAM_HEAD_BYTES_MAX",),
    "request body": ("gateway.limits.Limits.body_bytes_max",),
    "trailers of a request": ("gateway.framing.TRAILER_BYTES_MAX",),
    "chunks of a body": ("gateway.framing.CHUNKS_MAX", "gateway.framing.CHUNK_BYTES_MEAN"),
    "top-level members of a body; small values in one": (
        "gateway.outline.MEMBERS_MAX",
        "gateway.rewrite._COLONS_MAX",
    ),
    "body that is read in one go, kept as one": ("gateway.body.LARGE_BYTES",),
    "in a body over 256 KiB: a top-level name or number; a value that we read; levels inside a member": (
        "gateway.outline.TOKEN_BYTES_MAX",
        "gateway.outline.VALUE_BYTES_MAX",
        "gateway.outline.NESTING_MAX",
    ),
    "of a large body sent to an engine, of its memory given back, in one turn of the loop": (
        "gateway.upstream.TURN_BYTES",
        "gateway.front.GIVE_BACK_BYTES",
    ),
    "parts of a form; head of a part; a value that we read": (
        "gateway.multipart.PARTS_MAX",
        "gateway.multipart.PART_HEAD_BYTES_MAX",
        "gateway.multipart.VALUE_BYTES_MAX",
    ),
    "name of a Model in a path": ("gateway.dialects._NAME_BYTES_MAX",),
    "`X-Priority`": ("gateway.admission.PRIORITY_ABSOLUTE_MAX",),
    "time for a head, for a body": (
        "gateway.limits.Limits.header_seconds_max",
        "gateway.limits.Limits.body_seconds_max",
    ),
    "time for a TLS handshake": ("gateway.limits.Limits.header_seconds_max",),
    "goodbye of a TLS client": ("gateway.ends.LINGER_S",),
    "bytes sent ahead of their turn": ("gateway.wire.AHEAD_BYTES_MAX",),
    "answers to pipelined requests in one turn of the loop": ("gateway.edge.ANSWERS_A_TURN",),
    "what still arrives after a refusal": ("gateway.ends.LINGER_S",),
    "body that its head alone refuses (path, key, media type, Model in path or `X-Model`)": (
        "gateway.early.DROP_BYTES_MAX",
    ),
    "body to a path that takes none": ("gateway.early.DROP_BYTES_MAX",),
    "bodies in a gateway, from the first byte read until an engine answers": ("gateway.body.LARGE_BYTES",),
    "pace of a body, while others wait for room or are refused it": (
        "gateway.intake.PACE_BYTES_PER_S",
        "gateway.intake.PACE_GRACE_S",
    ),
    "form that goes on while it comes: its rest is expected within; comes within": (
        "gateway.intake.REST_S_MAX",
        "gateway.intake.GROWING_S_MAX",
    ),
    "small bodies that wait in all queues of a gateway": (),
    "connections of one address": ("gateway.limits.Limits.connections_per_address_max",),
    "open files of a gateway": (),
    "memory of a gateway": (),
    "idle client connection": ("gateway.limits.Limits.idle_seconds_max",),
    "client that does not read": ("gateway.outlet.WRITE_BUFFER_BYTES", "gateway.limits.Limits.write_stall_seconds_max"),
    "kept by the kernel for a client that does not read; of an engine's answer that nobody takes": (
        "pilotlight.listen.UNSENT_BYTES",
        "gateway.upstream.RECEIVE_BYTES",
    ),
    "accept queue": ("pilotlight.listen.BACKLOG",),
    "queue of a Model": ("autoscaler.contract.QueueLimits.calls_max", "autoscaler.contract.QueueLimits.bytes_max"),
    "time in the queue": ("autoscaler.contract.QueueLimits.wait_seconds_max",),
    "moves of a Call": (),
    "moves for busy engines": ("gateway.desk.RETRIES_MAX",),
    "Retry-After": ("gateway.errors.MAX_RETRY_AFTER_S", "gateway.desk.RETRY_AFTER_S"),
    "connect to an engine, TLS included": ("gateway.pool.CONNECT_S_MAX",),
    "an engine's certificate that does not hold": (),
    "connects at once to one engine": ("gateway.pool.CONNECTING_MAX",),
    "idle connections to one engine": ("gateway.pool.IDLE_MAX", "gateway.pool.IDLE_SWEEPS_MAX"),
    "engines remembered without a connection": ("gateway.pool.UNUSED_SWEEPS_MAX",),
    "heads remembered as read": (
        "gateway.head.KNOWN_MAX",
        "gateway.head.KNOWN_BYTES_MAX",
        "gateway.walker.KNOWN_MAX",
        "gateway.walker.KNOWN_BYTES_MAX",
    ),
    "head, interim heads and trailers of an engine": (
        "gateway.walker.HEAD_BYTES_MAX",
        "gateway.walker.INTERIM_MAX",
        "gateway.walker.TRAILER_BYTES_MAX",
    ),
    "of an engine's chunks or events, walked in one turn of the loop": (
        "gateway.walker.STEP_BYTES",
        "gateway.sse.RUNS_MAX",
    ),
    "begin of a chunk that is kept until its rest has come": ("gateway.sse.PART_BYTES_MAX",),
    "one unfinished event of a stream": ("gateway.sse.EVENT_BYTES_MAX",),
    "an engine's error told as an event": ("gateway.answer.ERROR_BODY_BYTES_MAX",),
    "first byte, stall, response of an engine": (
        "autoscaler.contract.Clocks.first_byte_seconds_max",
        "autoscaler.contract.Clocks.stall_seconds_max",
        "autoscaler.contract.Clocks.response_seconds_max",
    ),
    "event lines that wait": ("gateway.telemetry.EVENTS_MAX",),
    "metric series of a gateway": ("gateway.telemetry.SERIES_MAX",),
    "permissions remembered": ("gateway.tenants.RESOLVED_MAX",),
    "deltas not yet written to disk": ("gateway.sync.UNFOLDED_MAX",),
    "one message of the contract": ("gateway.link.LINE_BYTES_MAX", "autoscaler.serve.REPORT_BYTES_MAX"),
    "between two tries for a lost autoscaler": ("gateway.sync.RETRY_S_MAX",),
    "starts in one episode": ("autoscaler.model.Start.retries", "autoscaler.model.Start.seconds_max"),
    "starts at once on a Device": (),
    "a GPU that a DRA driver gives out in parts: wait for the rest of one on which another starts; emptied in one plan "
    "for who needs all of one": ("autoscaler.wholes.REST_S", "autoscaler.emptying.EMPTYING_MAX"),
    "Replicas asked for in one tick": ("autoscaler.compare.WANTS_MAX",),
    "moves of Replicas for room in pieces": ("autoscaler.defrag.EVERY_S", "autoscaler.defrag.AGAIN_S"),
    "search for moves": (
        "autoscaler.defrag.KINDS_MAX",
        "autoscaler.defrag.WANTS_MAX",
        "autoscaler.defrag.PLACES_MAX",
        "autoscaler.defrag.CANDIDATES_MAX",
        "autoscaler.defrag.MOVES_MAX",
        "autoscaler.defrag.PROOFS_MAX",
    ),
    "search for victims who may stay": (
        "autoscaler.spared.STEPS_MAX",
        "autoscaler.ground.MOVERS_MAX",
        "autoscaler.ground.PLACES_MAX",
    ),
    "nodes that are cut anew": (
        "autoscaler.cutting.EVERY_S",
        "autoscaler.cutting.NODE_EVERY_S",
        "autoscaler.cutting.NODES_MAX",
        "autoscaler.cutting.WANTS_MAX",
        "autoscaler.cuts.CUT_S_MAX",
        "autoscaler.cuts.TRIES_MAX",
    ),
    "our configurations in mig-manager's ConfigMap": ("autoscaler.drivers.kubernetes.cutting.KEPT_MAX",),
    "sets of Tenants for which it is kept where no stranger is": ("autoscaler.trust.TRUSTS_MAX",),
    "observations that wait for a step": ("autoscaler.inbox.INBOX_MAX",),
    "what is learnt from": (
        "autoscaler.outlook.KINDS_MAX",
        "autoscaler.lessons.ALIKE_MAX",
        "autoscaler.lessons.LANES_MAX",
        "autoscaler.learning.WEIGHTS_MAX",
    ),
    "learning": (
        "pilotlight.learner_process.CPU_S_MAX",
        "pilotlight.tutor.LEARNS_S_MAX",
        "pilotlight.learner_process.MEMORY_BYTES_MAX",
        "autoscaler.lessons.AGAIN_S",
        "autoscaler.lessons.FAILED_S",
    ),
    "plans in one step": ("autoscaler.loop.ROUNDS_MAX",),
    "probes": ("autoscaler.drivers.probes.PROBES_PER_S_MAX", "autoscaler.drivers.probes.PROBE_SECONDS_MAX"),
    "SIGTERM to SIGKILL": ("autoscaler.compare.STOP_GRACE_S", "pilotlight.autoscaler_process.ENGINE_GRACE_S"),
    "drain": ("autoscaler.drain.DRAIN_SECONDS_MAX",),
    "log of moves": ("autoscaler.log.ROWS_MAX",),
    "starts remembered": ("autoscaler.histories.STARTS_MAX",),
    "an engine's log; logs of those that ended": (
        "autoscaler.drivers.logs.BYTES_MAX",
        "autoscaler.drivers.logs.FILES_MAX",
    ),
    "Call events on disk": ("pilotlight.eventfile.BYTES_MAX",),
    "a registry: manifest; answer of a realm; error": (
        "artifacts.manifest.MANIFEST_BYTES_MAX",
        "artifacts.tokens.TOKEN_BYTES_MAX",
        "artifacts.client.ERROR_BYTES_MAX",
    ),
    "a registry: tries in a row; waits of one request, Retry-After included; redirects": (
        "artifacts.retrying.TRIES_MAX",
        "artifacts.retrying.WAIT_S_MAX",
        "artifacts.retrying.RETRY_AFTER_S_MAX",
        "artifacts.origin.REDIRECTS_MAX",
    ),
    "a registry: connect, head, between two reads; a blob's pace": (),
    "a registry: tags, referrers, pages of either": (
        "artifacts.registry.TAGS_MAX",
        "artifacts.referrers.REFERRERS_MAX",
        "artifacts.registry.PAGES_MAX",
    ),
    "a fetch of weights: requests side by side; parts of a blob; a span asked for anew because it stalled": (
        "artifacts.concurrency.MOST",
        "artifacts.parts.PARTS_MAX",
        "artifacts.stalls.ANEW_MAX",
    ),
    "a credential program": ("artifacts.programs.PROGRAM_S_MAX", "artifacts.programs.PROGRAM_BYTES_MAX"),
    "a cloud's login: answer; a metadata service's connection, answer; registries with one": (
        "artifacts.clouds.cloud.ANSWER_BYTES_MAX",
        "artifacts.clouds.metadata.CONNECT_S",
        "artifacts.clouds.metadata.WHOLE_S",
        "artifacts.clouds.cloud.KEPT_MAX",
    ),
    "GGUF header": ("artifacts.gguf.HEADER_BYTES_MAX", "artifacts.gguf.KEYS_MAX", "artifacts.gguf.TENSORS_MAX"),
    "manifest of an artifact; its config; its layers; entries of an index; indexes in indexes": (
        "artifacts.manifest.MANIFEST_BYTES_MAX",
        "artifacts.manifest.CONFIG_BYTES_MAX",
        "artifacts.manifest.LAYERS_MAX",
        "artifacts.manifest.ENTRIES_MAX",
        "artifacts.platforms.INDEX_DEPTH_MAX",
    ),
    "one layer of an artifact; all together": (
        "artifacts.descriptors.BLOB_BYTES_MAX",
        "artifacts.contents.BYTES_MAX",
    ),
    "JSON from a registry": (
        "artifacts.strict_json.DEPTH_MAX",
        "artifacts.strict_json.PARTS_MAX",
        "artifacts.descriptors.ANNOTATIONS_MAX",
    ),
    "signatures of a manifest: time to find them; manifests and layers looked at, of what refers to it and of its tag "
    "each": ("artifacts.trusting.SECONDS_MAX", "artifacts.trusting.LOOKS_MAX"),
    "one signature: bundle; payload; subjects; a key's text": (
        "artifacts.bundles.BUNDLE_BYTES_MAX",
        "artifacts.claims.PAYLOAD_BYTES_MAX",
        "artifacts.claims.SUBJECTS_MAX",
        "artifacts.publickeys.PEM_BYTES_MAX",
    ),
    "a log's entry for one: body; hashes; a trusted root's text, chain": (
        "artifacts.transparency.BODY_BYTES_MAX",
        "artifacts.transparency.HASHES_MAX",
        "artifacts.trustroot.ROOT_BYTES_MAX",
        "artifacts.trustroot.CHAIN_MAX",
    ),
    "an archive in an artifact: members; names and records of one; zeros after its end": (
        "artifacts.tar.ENTRIES_MAX",
        "artifacts.tar.META_BYTES_MAX",
        "artifacts.tar.TRAILING_BYTES_MAX",
    ),
    "what is compressed: bytes out of each in; so many whatever the ratio; zstd's window": (
        "artifacts.inflate.RATIO_MAX",
        "artifacts.inflate.FREE_BYTES",
        "artifacts.inflate.WINDOW_BYTES_MAX",
    ),
    "packing: files below one folder; a Modelfile; blobs pushed at once": (
        "pilotlight.packing.FILES_MAX",
        "pilotlight.importing.FILE_BYTES_MAX",
        "artifacts.remote.AT_ONCE",
    ),
    "path of a file in an artifact": (
        "artifacts.paths.PATH_BYTES_MAX",
        "artifacts.paths.PARTS_MAX",
        "artifacts.paths.NAME_BYTES_MAX",
    ),
    "a store of weights: another process's moment with it, with one Copy; choices overtaken by a lease": (
        "artifacts.shelf.LOCK_S_MAX",
        "artifacts.shelf.LEASE_S_MAX",
        "artifacts.ledger.TRIES_MAX",
    ),
    "a store of weights: a registry's yes, the same while it is away; how many are remembered": (
        "artifacts.permits.FRESH_S",
        "artifacts.permits.AWAY_S_MAX",
        "artifacts.permits.PERMITS_MAX",
    ),
    "a store of weights: what a broken pull left": ("artifacts.shelf.LEFT_S_MAX",),
    "a node's agent: artifacts fetched at once; Copies told; what is wanted no more held": (
        "pilotlight.keeping.PULLS_MAX",
        "pilotlight.keeping.COPIES_MAX",
        "pilotlight.keeping.LINGER_S",
    ),
    "a Replica waits for an agent that brings weights": ("autoscaler.wanted.AGENT_S_MAX",),
    "a store of weights: files of one artifact that nobody else fetches meanwhile": ("artifacts.store.LOCKS_MAX",),
    "a store of weights: waiting for a registry that hangs, of whom it let in before": ("artifacts.store.AWAY_WAIT_S",),
    "sums of parts beside an artifact: lists that are read; one list": (
        "artifacts.chunksums.LISTS_MAX",
        "artifacts.chunksums.LIST_BYTES_MAX",
    ),
    "a store of weights: meanings of references that are remembered": ("artifacts.meanings.MEANINGS_MAX",),
    "a store of weights: Copies whose first sums are remembered, of places that say none": ("artifacts.sums.SUMS_MAX",),
    "files of a repository of the Hub, or below a key of a bucket": ("artifacts.listing.FILES_MAX",),
    "pages of the Hub's list of files, of a bucket's": ("artifacts.hub.PAGES_MAX", "artifacts.bucket.PAGES_MAX"),
    "XML of S3 and STS": ("artifacts.plainxml.BYTES_MAX",),
    "peers: those that one pull asks; files that a node gives at once": (
        "artifacts.peers.PEERS_MAX",
        "artifacts.serving.STREAMS_MAX",
    ),
    "a peer that is busy, failed, lacks it; is fetching it": (
        "artifacts.peers.BUSY_S",
        "artifacts.peers.BUSY_S_MAX",
        "artifacts.peers.FAILED_S",
        "artifacts.peers.LACKS_S",
        "artifacts.peers.COMING_S_MAX",
    ),
    "a peer that does not read": ("artifacts.serving.STEP_BYTES", "artifacts.serving.STEP_S_MAX"),
    "an archive that peers are given out of its files: what lies beside them; its recipe": (
        "artifacts.recipes.REST_BYTES_MAX",
        "artifacts.recipes.RECIPE_BYTES_MAX",
    ),
    "header of a GGUF file in a registry": ("artifacts.headers.BYTES_MAX",),
    "names in all archives of an artifact": ("artifacts.fill.NAMES_MAX",),
    "engine images that an agent brings: at once; wanted on its node, told to it; one pull; after a failure again in": (
        "artifacts.images.PULLS_MAX",
        "artifacts.images.WANTED_MAX",
        "autoscaler.prepull.NODE_MAX",
        "artifacts.images.PULL_S_MAX",
        "artifacts.images.AGAIN_S",
        "artifacts.images.AGAIN_S_MAX",
    ),
    "a store of weights: `copy.json`": ("artifacts.layout.RECORD_BYTES_MAX",),
    "reference to an artifact": ("artifacts.reference.TEXT_CHARS_MAX", "artifacts.reference.NAME_CHARS_MAX"),
    "documents": ("autoscaler.strict_yaml.TEXT_CHARS_MAX",),
    "a file of certificates; of tokens": (
        "pilotlight.certificates.TOKEN_FILE_BYTES_MAX",
        "pilotlight.certificates.TOKENS_MAX",
    ),
    "stored keys": ("pilotlight.keys.KEYS_MAX",),
}
"""Each row's first cell, and the bounds that it tells; none where it is a rule or the machine's own number."""

NOT_TOLD = {
    "gateway.finding.ADDRESSES_MAX": "autoscalers behind one name that are followed: the installation has few",
    "gateway.tenants.SALTS_MAX": "salts remembered: 1 MiB",
    "gateway.address.PORT_MAX": "of TCP: grammar",
    "gateway.sse.SIZES_MAX": "chunk sizes remembered as read: a few KiB",
    "gateway.sse._SIZE_BYTES_MAX": "8 digits and their CRLF: grammar",
    "gateway.limits.Limits.memory_bytes": "0 means the cgroup's: the row says so in words",
    "gateway.telemetry.WRITES_PER_FLUSH_MAX": "the pace of writing: what is left waits as an event line",
    "gateway.pool.LEARN_SWEEPS_MAX": "when an engine is taken to close after streams: no bound",
    "gateway.upstream.JOIN_BYTES_MAX": "up to where head and body go out in one call: no bound",
    "gateway.head.LENGTH_DIGITS_MAX": "of a length in a head that is remembered: others are read anew",
    "gateway.head._LENGTH_DIGITS_MAX": "more digits than 2^63 has are no number: grammar",
    "gateway.walker._LENGTH_DIGITS_MAX": "the same of an engine",
}


class Row(NamedTuple):
    """One bound as the page tells it."""

    value: str
    reached: str


def told() -> dict[str, Row]:
    """The table."""
    return {first: Row(value, reached) for first, value, reached in _ROW.findall(SECTION)}


def value_of(path: str) -> float:
    """What a bound is: a module's name, or the default of a Struct's field."""
    module, _, last = path.rpartition(".")
    owner = module.rpartition(".")[2]
    if owner[:1].isupper():
        struct = getattr(importlib.import_module(module.rpartition(".")[0]), owner)
        return float(next(field.default for field in msgspec.structs.fields(struct) if field.name == last))
    return float(getattr(importlib.import_module(module), last))


def spellings(path: str, value: float) -> set[str]:
    """How a page may say it: `64 KiB`, `15 s`, `1,000`, `16 million`."""
    number = int(value)
    if "BYTES" in path.upper():
        units = ((0, "B"), (10, "KiB"), (20, "MiB"), (40, "TiB"))
        return {f"{number >> shift} {unit}" for shift, unit in units if number >> shift}
    if re.search(r"_S\b|_S_|SECONDS|SWEEPS", path.upper()):  # upstreams are swept once a second
        return {f"{value:g} s", f"{value:g} to ", f"{value:g} a second"}
    millions = {f"{number / 1e6:g} million", f"{number >> 20} million", "a million"} if number >= 1_000_000 else set()
    return {f"{number:,}", *millions}


def bounds(path: Path) -> Iterator[str]:
    """The bounds of a module, by the form of their names."""
    module = name(path).replace("/", ".").removesuffix(".__init__")
    for node in ast.parse(path.read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Name) and _BOUND.fullmatch(each.id):
                    yield f"{module}.{each.id}"


def errors_of_gateways() -> set[tuple[str, str]]:
    """(status, code) of every error that a gateway makes; 503 has also the codes that an autoscaler gives it."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / "gateway" / "errors.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "CallError":
            status, code = node.args[:2]
            if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                found.add((str(status.value), str(code.value)))
    published = (ROOT / "autoscaler" / "publish.py").read_text()
    return found | {("503", code) for code in re.findall(r'"([a-z]+(?:_[a-z]+)+)"', published)}


def test_every_row_is_known_and_every_bound_here_has_a_row() -> None:
    assert list(told()) == list(ROWS)


@pytest.mark.parametrize("row", [row for row, paths in ROWS.items() if paths])
def test_a_row_tells_the_value_that_the_code_has(row: str) -> None:
    text = told()[row].value
    for path in ROWS[row]:
        wanted = spellings(path, value_of(path))
        assert any(re.search(rf"(?<![\d,.]){re.escape(each)}", text) for each in wanted), (
            f"{path}: {wanted} in {text!r}"
        )


def test_the_errors_of_the_table_are_errors_that_there_are() -> None:
    known = errors_of_gateways()
    statuses = {status for status, _ in known}
    for row, (_, reached) in told().items():
        for status, *codes in _ERROR.findall(reached):
            assert status in statuses, f"{row}: {status}"
            for code in filter(None, codes):
                assert (status, code) in known, f"{row}: {status} {code}"


def test_every_bound_of_a_gateway_is_in_the_table() -> None:
    listed = {path for paths in ROWS.values() for path in paths} | NOT_TOLD.keys()
    limits = {f"gateway.limits.Limits.{field}" for field in Limits.__struct_fields__}
    assert {each for path in GATEWAY for each in bounds(path)} | limits <= listed
    for path in NOT_TOLD:
        value_of(path)
