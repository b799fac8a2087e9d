"""Fuzz target for the contract between gateways and autoscalers: a message is decoded, or rejected with one error."""

from __future__ import annotations

import msgspec

from autoscaler.agent_contract import NodeAnswer, NodeReport, NodeWants
from autoscaler.contract import CatalogueDelta, Report, ReportAnswer, RoutesDelta, make_decoder
from autoscaler.weights.peers import NodePeers
from gateway.control.snapshot_file import GatewaySnapshot
from pilotlight.models.header_report import Header

KINDS: tuple[type[msgspec.Struct], ...] = (
    CatalogueDelta,
    RoutesDelta,
    Report,
    ReportAnswer,
    NodeReport,
    NodeAnswer,
    NodeWants,
    NodePeers,
    GatewaySnapshot,
    Header,
)
"""All types that the product decodes with `autoscaler.contract.make_decoder`."""
_DECODERS = [make_decoder(kind) for kind in KINDS]
_CATALOGUE = (
    b'{"epoch":1,"version":2,"full":true,"models":[{"name":"m","served_name":"s","aliases":["a"],"slots":4,"queue":'
    b'{"calls_max":1},"clocks":{"stall_seconds_max":1.5},"policy":{"forced":{"a":"1"},"caps":{"n":'
    b'1},"removed":["b"],"request_check":{"url":"http://h/"}}}],"models_gone":["n"],"tenants":[{"name":"t","keys":[{"sha256":'
    b'"ab","expires_unix_s":1.0}],"models":["*"],"weight":2.0}],"settings":{"keys_needed":true,"cors_origins":["*"],'
    b'"hosts":["a.example"]}}'
)
_ROUTES = (
    b'{"epoch":1,"version":2,"gateways":2,"replicas":[{"replica":"r","model":"m","state":"ready","address":"h:1","hold":3'
    b'}],"replicas_gone":["q"],"models":[{"model":"m","phases_ms":{"load":1.5},"refusal":{"code":"c","message":"m"}}]}'
)
_REPORT = (
    b'{"gateway":"g","boot":"b","sequence":1,"levels":[{"model":"m","tenant":"t","waiting":1,"soonest_deadline_s":null}],'
    b'"totals":[{"model":"m","tenant":"t","tokens_in":5}],"replicas":[{"replica":"r","last_byte_age_s":0.5}]}'
)
SEEDS = (
    _CATALOGUE,
    _ROUTES,
    _REPORT,
    b'{"epoch":1,"leads":false,"resend":true}',
    b'{"epoch":1,"version":1,"models_gone":["\xff"]}',
    b'{"epoch":1,"version":1,"later":' + b"[" * 1500 + b"]" * 1500 + b"}",
)
WORDS = (
    b'"epoch":', b'"version":', b'"models":', b'"replicas":', b'"levels":', b'"totals":', b"null", b"true", b"1e999",
    b"-1", b"0.5", b"{}",
    b"[]", b"[{}]", b'"\\ud800"', b"\xff", b"99999999999999999999", b'"phases_ms":{"a":', b",", b":", b"[", b"]",
    b"{", b"}", b'"',
)  # fmt: skip


def messages(data: bytes) -> None:
    """Decode one message as each type."""
    for decode in _DECODERS:
        try:
            message = decode(data)
        except msgspec.DecodeError:
            continue
        assert decode(msgspec.json.encode(message)) == message
