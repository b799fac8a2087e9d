"""Which callers may use which models: keys, names, permissions."""

from __future__ import annotations

from hashlib import sha256

import pytest

from autoscaler.contract import (
    DEFAULT_TENANT,
    AdapterEntry,
    CatalogueDelta,
    FrontSettings,
    KeyEntry,
    ModelEntry,
    ModelName,
    PolicyEntry,
    TenantEntry,
    TenantName,
)
from gateway.errors import CallError, invalid_api_key, model_not_found
from gateway.request import model_names
from gateway.request.auth import Directory, cache_salt


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def key(text: str, *, expires_unix_s: float | None = None, role: str = "tenant") -> KeyEntry:
    return KeyEntry(sha256=hashed(text), expires_unix_s=expires_unix_s, role=role)


def model(
    name: str,
    *,
    aliases: tuple[str, ...] = (),
    only: tuple[str, ...] | None = None,
    unlisted: bool = False,
    born: int = 0,
) -> ModelEntry:
    return ModelEntry(
        name=ModelName(name),
        served_name=name,
        aliases=aliases,
        tenants=None if only is None else tuple(TenantName(tenant) for tenant in only),
        unlisted=unlisted,
        created_unix_s=born,
    )


def tenant(name: str, *keys: KeyEntry, models: tuple[str, ...] | None = None, weight: float = 1.0) -> TenantEntry:
    return TenantEntry(name=TenantName(name), keys=keys, models=models, weight=weight)


def directory(*entries: ModelEntry | TenantEntry, keys_needed: bool = True) -> Directory:
    made = Directory()
    made.apply(
        CatalogueDelta(
            epoch=1,
            version=1,
            full=True,
            models=tuple(entry for entry in entries if isinstance(entry, ModelEntry)),
            tenants=tuple(entry for entry in entries if isinstance(entry, TenantEntry)),
            settings=FrontSettings(keys_needed=keys_needed),
        )
    )
    return made


def may(known: Directory, who: TenantEntry, name: str) -> bool:
    try:
        known.names.resolve(who, name)
    except CallError as error:
        if error != model_not_found():
            raise
        return False
    return True


def test_request_with_a_tenant_key_is_authenticated_as_that_tenant() -> None:
    acme = tenant("acme", key("ki"), key("kä"))
    known = directory(acme, tenant("lab", key("other")))
    assert known.authenticate((hashed("ki"),), 0.0) == acme
    assert known.authenticate((hashed("kä"),), 0.0) == acme
    assert known.authenticate((hashed("other"),), 0.0).name == "lab"


@pytest.mark.parametrize("sent", [None, "", "wrong", "old", "reader"])
def test_missing_unknown_expired_and_non_tenant_keys_get_the_same_error(sent: str | None) -> None:
    known = directory(tenant("acme", key("old", expires_unix_s=100.0), key("reader", role="finance")))
    with pytest.raises(CallError) as caught:
        known.authenticate(() if sent is None else (hashed(sent),), 100.0)
    assert caught.value == invalid_api_key()
    assert known.authenticate((hashed("old"),), 99.0).name == "acme"


def test_request_with_a_valid_and_an_invalid_key_is_authenticated() -> None:
    known = directory(tenant("acme", key("a"), key("b")), tenant("lab", key("c")))
    for sent in (("a",), ("a", "another service's"), ("another service's", "a"), ("a", "b")):
        assert known.authenticate(tuple(hashed(one) for one in sent), 0.0).name == "acme"
    with pytest.raises(CallError, match="two valid API keys of different tenants") as caught:
        known.authenticate((hashed("a"), hashed("c")), 0.0)
    assert caught.value.status == 401
    with pytest.raises(CallError) as caught:
        known.authenticate((hashed("x"), hashed("y")), 0.0)
    assert caught.value == invalid_api_key()


def test_request_belongs_to_the_default_tenant_if_no_keys_are_required() -> None:
    known = directory(keys_needed=False)
    assert known.authenticate((), 0.0).name == DEFAULT_TENANT
    assert known.authenticate((hashed("anything"),), 0.0).name == DEFAULT_TENANT


def test_anonymous_request_gets_the_weight_of_the_default_tenant_document() -> None:
    known = directory(tenant("default", weight=3.0), keys_needed=False)
    assert known.authenticate((), 0.0).weight == 3.0


def test_model_name_or_alias_resolves_to_the_same_model() -> None:
    known = directory(model("llama", aliases=("gpt",)))
    who = tenant("acme")
    assert known.names.resolve(who, "llama").name == "llama"
    assert known.names.resolve(who, "gpt").name == "llama"
    assert not may(known, who, "LLAMA")


def test_name_claimed_by_two_models_resolves_to_the_oldest_model() -> None:
    known = directory(model("new", aliases=("gpt",), born=9), model("old", aliases=("gpt", "new"), born=1))
    who = tenant("acme")
    assert known.names.resolve(who, "gpt").name == "old"
    assert known.names.resolve(who, "new").name == "old"
    assert [entry.name for entry in known.names.visible(who)] == ["old"]


@pytest.mark.parametrize(
    ("only", "globs", "expected"),
    [
        (None, None, True),
        (("acme",), None, True),
        (("lab",), None, False),
        (None, ("qwen-*",), True),
        (None, ("llama",), False),
        (("acme",), ("qwen-*",), True),
        (("acme",), ("llama",), False),
        (("lab",), ("qwen-*",), False),
        (None, ("QWEN-*",), False),
        (None, (), False),
    ],
)
def test_tenant_may_use_a_model_only_if_model_and_tenant_both_allow_it(
    only: tuple[str, ...] | None, globs: tuple[str, ...] | None, expected: bool
) -> None:
    known = directory(model("qwen-7b", only=only))
    assert may(known, tenant("acme", models=globs), "qwen-7b") is expected


def test_unlisted_model_accepts_requests_but_is_absent_from_model_list() -> None:
    known = directory(model("b"), model("a"), model("hidden", unlisted=True), model("theirs", only=("lab",)))
    who = tenant("acme")
    assert [entry.name for entry in known.names.visible(who)] == ["a", "b"]
    assert may(known, who, "hidden")


def test_newer_catalogue_applies_at_once_and_an_older_one_is_ignored() -> None:
    known = directory(model("llama"), tenant("acme", key("ki")))
    who = known.authenticate((hashed("ki"),), 0.0)
    assert may(known, who, "llama")
    known.apply(CatalogueDelta(epoch=1, version=2, models=(model("llama", only=("lab",)),)))
    assert not may(known, who, "llama")
    known.apply(CatalogueDelta(epoch=1, version=1, models=(model("llama"),)))
    assert not may(known, who, "llama")
    known.apply(CatalogueDelta(epoch=1, version=3, tenants_gone=(who.name,), models_gone=(ModelName("llama"),)))
    with pytest.raises(CallError):
        known.authenticate((hashed("ki"),), 0.0)


def test_cache_of_resolved_model_names_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_names, "RESOLVED_MAX", 8)
    known = directory(*(model(f"m{n}") for n in range(30)))
    for n in range(30):
        assert may(known, tenant("acme"), f"m{n}")
        assert not may(known, tenant("acme"), f"unknown{n}")
        assert len(known.names._resolved) <= 8


def test_cache_salts_of_two_tenants_differ_and_contain_no_tenant_name() -> None:
    salts = {cache_salt(TenantName(name)) for name in ("acme", "lab", "default")}
    assert len(salts) == 3
    assert all(len(salt) == 32 and "acme" not in salt for salt in salts)
    assert cache_salt(TenantName("acme")) in salts, "the same for all its Calls"


class CountedModel(ModelEntry, frozen=True):
    """A Model that counts the reads of its fields."""

    def __getattribute__(self, name: str) -> object:
        reads.append(name)
        return super().__getattribute__(name)


reads: list[str] = []


def test_change_of_the_catalogue_reads_only_the_models_that_it_contains() -> None:
    policy = PolicyEntry(removed=("tools",))
    adapters = tuple(AdapterEntry(name=f"a{number}", served_name="a") for number in range(8))
    models = tuple(
        CountedModel(name=ModelName(name), served_name=name, aliases=(f"{name}-1",), adapters=adapters, policy=policy)
        for name in ("m", "n", "o")
    )
    known = directory(*models)
    assert reads
    assert known.policies is not None
    assert known.policies._found == {}
    assert known.names.resolve(tenant("t"), "m-1:a7").name == "m"
    reads.clear()
    resolved = dict(known.names._resolved)
    for version in range(2, 5):
        assert known.apply(CatalogueDelta(epoch=1, version=version)) == {}
    assert (reads, known.names._resolved) == ([], resolved)
    changed = ModelEntry(name=ModelName("p"), served_name="p", aliases=("p-1",), adapters=adapters, policy=policy)
    for version, delta in enumerate(
        (
            CatalogueDelta(epoch=1, version=5, models=(changed,)),
            CatalogueDelta(epoch=1, version=6, models=(ModelEntry(name=ModelName("p"), served_name="p"),)),
            CatalogueDelta(epoch=1, version=7, models_gone=(ModelName("p"),)),
            CatalogueDelta(epoch=1, version=8, tenants=(tenant("u"),)),
            CatalogueDelta(epoch=1, version=9, settings=FrontSettings()),
        )
    ):
        assert known.apply(delta) == {}
        assert may(known, tenant("t"), "p:a1") is (version == 0)
        assert reads == []
    assert known.policies._found == {}
