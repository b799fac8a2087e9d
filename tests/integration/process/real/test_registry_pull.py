"""An artifact pushed to a real registry with a login is pulled from there into the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts import reference
from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.fetch import registry
from artifacts.fetch.registry import Registries
from artifacts.http.transport import Site
from artifacts.pack import chunk_sums, push_artifact
from artifacts.registry.client import Client
from artifacts.registry.referrers import list_referrers
from artifacts.store.store import Store
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.packed_models import FILES, NAME
from tests.support.harness.artifacts.registry_pull import small
from tests.support.real_services import docker_registry


async def test_pushed_artifact_is_pulled_unchanged_with_a_password(tmp_path: Path) -> None:
    layout = packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout")
    async with docker_registry.registry(tmp_path, docker_registry.htpasswd(tmp_path)) as host:
        keychain = Known(host, Login(docker_registry.USER, docker_registry.PASSWORD))
        async with Client(Site(host), keychain) as client:
            digest = await packed_models.push(client, layout)
        store = Store(tmp_path / "store", spare_bytes=0).open()
        of = reference.parse_reference(f"oci://{host}/{NAME}:v1")
        with await registry.fetch_from_registry(of, store, Registries(keychain)) as copy:
            assert {path: (copy.folder / path).read_bytes() for path in FILES} == FILES
            assert (copy.record.digest, copy.record.private) == (digest, True)


async def test_repeated_push_stores_chunk_checksums_once_as_an_oci_referrer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry does not index referrers itself."""
    small(monkeypatch)
    layout = packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout", "modelpack-raw")
    async with docker_registry.registry(tmp_path) as host, Client(Site(host)) as client:
        digest = await push_artifact.push_layout(client, NAME, "v1", layout)
        assert await push_artifact.push_layout(client, NAME, "v1", layout) == digest
        large = next(one for one in layout.whole().blobs if one.size == len(FILES["model.gguf"]))
        assert len(await chunk_sums.fetch_chunk_sums(client, NAME, digest, large.digest, large.size)) == 18
        assert len(await list_referrers(client, NAME, digest, chunk_sums.KIND)) == 1
