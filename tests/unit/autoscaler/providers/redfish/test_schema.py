"""Parsing of Redfish documents, and rejection of malformed ones."""

from __future__ import annotations

import json

import pytest

from autoscaler.contract import ModelName
from autoscaler.providers.redfish import schema as documents
from autoscaler.providers.redfish.schema import BlockMark, RedfishDocumentError

BLOCK = {
    "@odata.id": "/redfish/v1/CompositionService/ResourceBlocks/DeviceBlock-41",
    "Status": {"State": "Enabled", "Health": "OK"},
    "CompositionStatus": {"Reserved": False, "CompositionState": "Unused"},
    "Processors": [{"@odata.id": "/redfish/v1/Chassis/Chassis-1/Processors/PROC-550001"}],
    "Links": {
        "ComputerSystems": [],
        "Chassis": [],
        "Zones": [{"@odata.id": "/redfish/v1/CompositionService/ResourceZones/GlobalZone"}],
    },
}
"""Documents of CDIM's hw-emulator."""


def body(**more: object) -> bytes:
    return json.dumps({**BLOCK, **more}).encode()


def test_block_is_parsed_with_and_without_the_client_field() -> None:
    one = documents.parse_block(body())
    assert (one.free_for, one.sound, one.etag) == (None, True, "")
    assert one.processors == ("/redfish/v1/Chassis/Chassis-1/Processors/PROC-550001",)
    assert one.zones == ("/redfish/v1/CompositionService/ResourceZones/GlobalZone",)
    kept = documents.parse_block(body(Client=None, **{"@odata.etag": 'W/"1"'}))
    assert (kept.free_for, kept.etag) == ("", 'W/"1"')
    assert documents.parse_block(body(), '"head"').etag == '"head"'


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ("/redfish/v1/Tasks/1/", "/redfish/v1/Tasks/1"),
        ("https://rack-1.internal:443/redfish/v1/Tasks/1?of=us#now", "/redfish/v1/Tasks/1?of=us"),
        ("HTTP://rack-1/redfish/v1/Tasks/1", "/redfish/v1/Tasks/1"),
        ("//rack-1/redfish/v1/Tasks/1", "/redfish/v1/Tasks/1"),
        ("/redfish/v1/Tasks/1?of=\udce4", ""),
        ("https://rack-1.internal/Tasks/1", ""),
        ("https://rack-1.internal/redfish/v1/../../Tasks", ""),
        ("https://[rack/redfish/v1/Tasks/1", "/redfish/v1/Tasks/1"),
        ("https://rack-1.internal?at=/redfish/v1/Tasks/1", ""),
        ("redfish/v1/Tasks/1", ""),
        ("", ""),
    ],
)
def test_task_url_is_reduced_to_its_redfish_path_or_ignored(document: str, place: str) -> None:
    assert documents.parse_location(document) == place


@pytest.mark.parametrize(
    "document",
    [
        {"Status": {"State": "Absent"}},
        {"Status": {"Health": "Critical"}},
        {"CompositionStatus": {"CompositionState": "Failed"}},
        {"CompositionStatus": {"CompositionState": "Unavailable"}},
    ],
)
def test_block_with_an_error_status_is_unhealthy(document: dict[str, object]) -> None:
    assert not documents.parse_block(body(**document)).sound


@pytest.mark.parametrize(
    "path",
    [
        "https://evil.example/redfish/v1/x",
        "//evil.example/redfish/v1",
        "/redfish/v1/../../etc",
        "/redfish/v2/Systems",
        "",
        "/redfish/v1/a b",
        "/redfish/v1/x?y=1",
        "/redfish/v1/x#y",
        "/redfish/v1/" + "x" * 600,
        "/redfish/v1/\nX: y",
    ],
)
def test_resource_path_malformed_or_outside_the_service_is_rejected(path: str) -> None:
    with pytest.raises(RedfishDocumentError):
        documents.parse_block(body(**{"@odata.id": path}))


@pytest.mark.parametrize("document", [b"", b"{}", b"[]", b"null", b"<html>", b"\xff", b"[" * 5000, b'{"@odata.id": 7}'])
def test_malformed_redfish_document_is_rejected(document: bytes) -> None:
    for read in (documents.parse_block, documents.parse_system, documents.parse_collection):
        with pytest.raises(RedfishDocumentError, match="expected"):
            read(document)


@pytest.mark.parametrize(
    ("document", "memory_mib"),
    [
        ({"MemorySummary": {"TotalMemorySizeMiB": 40960}}, 40960),
        (
            {
                "ProcessorMemory": [
                    {"CapacityMiB": 40960, "MemoryType": "HBM2E"},
                    {"CapacityMiB": 40, "MemoryType": "L2Cache"},
                ]
            },
            40960,
        ),
        ({}, None),
        ({"MemorySummary": {"TotalMemorySizeMiB": -1}}, None),
        ({"MemorySummary": {"TotalMemorySizeMiB": 1e300}}, None),
    ],
)
def test_gpu_without_type_model_or_memory_is_rejected(document: dict[str, object], memory_mib: int | None) -> None:
    one = {"ProcessorType": "GPU", "Model": "NVIDIA A100 PCIe", "UUID": "GPU-7", **document}
    assert documents.parse_gpu(json.dumps({**one, "ProcessorType": "CPU"}).encode()) is None
    for less in (one if memory_mib is None else {}, {**one, "ProcessorType": None}, {**one, "Model": ""}):
        with pytest.raises(RedfishDocumentError, match="type, model and memory"):
            documents.parse_gpu(json.dumps(less).encode())
    if memory_mib is not None:
        found = documents.parse_gpu(json.dumps(one).encode())
        assert found is not None
        assert (found.memory_bytes >> 20, found.product, found.uuid) == (memory_mib, "NVIDIA-A100-PCIe", "GPU-7")


def test_only_the_uuid_of_an_nvidia_gpu_gets_the_prefix_gpu() -> None:
    bare = "B0AED23C-0000-1111-2222-333344445555"
    one = {"ProcessorType": "GPU", "Model": "NVIDIA L40S", "UUID": bare, "MemorySummary": {"TotalMemorySizeMiB": 46068}}
    found = documents.parse_gpu(json.dumps(one).encode())
    assert found is not None
    assert found.uuid == f"GPU-{bare.lower()}"
    other = documents.parse_gpu(json.dumps({**one, "Model": "Instinct MI300X"}).encode())
    assert other is not None
    assert other.uuid == bare


@pytest.mark.parametrize(("model", "uuid"), [("NVIDIA L40S", ""), ("Instinct MI300X", "1650323")])
def test_serial_number_replaces_a_missing_uuid_except_for_nvidia(model: str, uuid: str) -> None:
    one = {"ProcessorType": "GPU", "Model": model, "MemorySummary": {"TotalMemorySizeMiB": 46068}}
    found = documents.parse_gpu(json.dumps({**one, "SerialNumber": "1650323"}).encode())
    assert found is not None
    assert found.uuid == uuid


def test_owner_tag_is_parsed_back_as_written() -> None:
    for removed in (False, True):
        one = BlockMark("pilotlight-a-0123456789", ModelName("team/llama-8b:q4"), 7, 2, "worker-1", "rack", 4, removed)
        assert documents.parse_mark(one.text()) == one


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "somebody",
        "pilotlight",
        "pilotlight name=a node=w by=rack before=0 devices=x epoch=1 owner=b",
        "pilotlight name= node=w by=rack before=0 devices=1 epoch=1",
        "pilotlight name=a node=w before=0 devices=1 epoch=1",
        "pilotlight name=a node=w by=rack before=0 devices=" + "9" * 99 + " epoch=1",
        "pilotlight-gone name=a" + " x" * 600,
        "pilotlight name=a by=rack before=0 devices=1 epoch=1",
    ],
)
def test_foreign_or_malformed_owner_tag_is_ignored(text: str | None) -> None:
    assert documents.parse_mark(text) is None


@pytest.mark.parametrize(
    ("document", "over", "well"),
    [
        ({"TaskState": "Running"}, False, False),
        ({"TaskState": "New"}, False, False),
        ({"TaskState": "Completed", "TaskStatus": "OK"}, True, True),
        ({"TaskState": "Completed", "TaskStatus": "Critical"}, True, False),
        ({"TaskState": "Exception"}, True, False),
        ({"TaskState": "Killed"}, True, False),
        ({}, True, True),
    ],
)
def test_redfish_task_outcome_is_derived_from_its_state_and_status(
    document: dict[str, str], *, over: bool, well: bool
) -> None:
    found = documents.parse_task(json.dumps(document).encode())
    assert (found.over, found.well and found.over) == (over, well)
