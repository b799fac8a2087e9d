"""Builds the catalogue of Models and Tenants for gateways, in full or as a difference. Pure.

An entry contains no fields that only the autoscaler needs (weights, memory, commands, environment).
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from autoscaler.contract import (
    AdapterEntry,
    CatalogueDelta,
    Clocks,
    FrontSettings,
    KeyEntry,
    ModelEntry,
    PolicyCheck,
    PolicyEntry,
    QueueLimits,
    TenantEntry,
    TritonEntry,
)
from autoscaler.engines import artifact_path
from autoscaler.exception_handling import Failure, attempt
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.spec.engine_definition import Adapters, fill_template
from autoscaler.spec.engines import CHAT_TEMPLATES, ENGINES, TRITON, TRITON_BACKENDS, takes_stream_options
from autoscaler.spec.model import Model, Triton
from autoscaler.spec.policy import Members, ModelPolicy, RequestCheck, RequestPolicy
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Tenant
from autoscaler.state.world import World
from autoscaler.text import unix_seconds
from autoscaler.weights.mount_choice import path_of


def build_policy_entry(policy: RequestPolicy) -> PolicyEntry | None:
    """Return the message for gateways; None if the policy is empty."""
    by_name = policy.forced_by_name if isinstance(policy, ModelPolicy) else {}
    answer = policy.answer_check
    entry = PolicyEntry(
        defaults=_texts(policy.defaults),
        forced=_texts(policy.forced),
        caps=policy.caps,
        removed=policy.removed,
        forced_by_name={name: _texts(members) for name, members in by_name.items()},
        request_check=_check_entry(policy.request_check),
        answer_check=_check_entry(answer, rejects_streams=answer is not None and answer.streams == "reject"),
    )
    return None if entry == PolicyEntry() else entry


def _texts(members: Members) -> dict[str, str]:
    return {name: msgspec.json.encode(value).decode() for name, value in members.items()}


def _check_entry(check: RequestCheck | None, *, rejects_streams: bool = False) -> PolicyCheck | None:
    if check is None:
        return None
    return PolicyCheck(
        url=check.url, timeout_s=check.timeout_seconds, fail_open=check.fail_open, rejects_streams=rejects_streams
    )


def model_entry(model: Model) -> ModelEntry:
    """Entry of one model. `served_name` is the name that its engine serves and that request bodies carry."""
    spec, engine = model.spec, ENGINES[model.spec.engine]
    path = path_of(spec.artifact) or artifact_path(spec.artifact)
    return ModelEntry(
        name=model.name,
        served_name=path if engine.named_by_path and path else model.served(),
        aliases=spec.aliases,
        serves_aliases=model.adopted is not None,
        adapters=_adapters(model, engine.adapters),
        lora=_lora(0, 0) if spec.adapters and engine.adapters is not None and engine.adapters.by_lora else "",
        tenants=spec.tenants,
        dialects=engine.dialects,
        unlisted=spec.unlisted,
        paused=spec.paused,
        slots=model.slots,
        context_tokens=spec.context_tokens,
        created_unix_s=model.created_unix_s,
        closes_after_stream=engine.closes_after_stream,
        takes_cache_salt=engine.takes_cache_salt,
        takes_stream_options=takes_stream_options(engine, spec.command),
        queue=QueueLimits(
            calls_max=spec.queue.calls_max,
            bytes_max=int(spec.queue.bytes_max),
            wait_seconds_max=spec.queue.wait_seconds_max,
        ),
        clocks=Clocks(
            response_seconds_max=spec.response_seconds_max,
            first_byte_seconds_max=spec.first_byte_seconds_max,
            stall_seconds_max=spec.stall_seconds_max,
        ),
        policy=build_policy_entry(spec.policy),
        triton=_triton_entry(spec.triton or Triton()) if engine is TRITON else None,
    )


def _triton_entry(triton: Triton) -> TritonEntry:
    """Return the inputs of a model of Triton."""
    return msgspec.structs.replace(
        TRITON_BACKENDS[triton.backend],
        chat_template=CHAT_TEMPLATES[triton.chat_template],
        embedding_input=triton.embedding_input,
    )


def _adapters(model: Model, support: Adapters | None) -> tuple[AdapterEntry, ...]:
    if support is None:
        return ()
    return tuple(
        AdapterEntry(
            name=adapter.name,
            served_name="".join(
                fill_template((support.served_name,), {"name": model.served(), "adapter": adapter.name})
            ),
            lora=_lora(position, 1) if support.by_lora else "",
        )
        for position, adapter in enumerate(model.spec.adapters)
    )


def _lora(position: int, scale: int) -> str:
    """Return llama.cpp's selection of one adapter; all others get scale 0.
    The list must not be empty: without one, llama.cpp may answer from what it computed with an adapter.
    """
    return f'[{{"id":{position},"scale":{scale}}}]'


def tenant_entry(tenant: Tenant) -> TenantEntry:
    """Entry of one tenant; its keys are already hashed."""
    return TenantEntry(
        name=tenant.name,
        keys=tuple(
            KeyEntry(
                sha256=key.sha256,
                name=key.name,
                role=key.role,
                expires_unix_s=unix_seconds(key.expires_at) if key.expires_at else None,
            )
            for key in tenant.spec.keys
        ),
        models=tenant.spec.models,
        weight=tenant.spec.weight,
        priority_max=tenant.spec.priority_max,
        policy=build_policy_entry(tenant.spec.policy),
    )


def front_settings(settings: Settings, tenants: Collection[Tenant]) -> FrontSettings:
    """Settings of the inference port. `auth: auto` requires keys as soon as there is a Tenant document."""
    return FrontSettings(
        keys_needed=settings.auth == "keys" or (settings.auth == "auto" and bool(tenants)),
        keepalive_seconds=settings.stream.keepalive_seconds,
        silent_seconds_max=settings.silent_seconds_max,
        cors_origins=settings.cors.origins,
        hosts=settings.hosts,
        lists_aliases=settings.models.list_aliases,
        default_model=settings.default_model or "",
        check_hosts=settings.checks.hosts,
        service_networks=settings.checks.service_networks,
    )


def catalogue_full(world: World) -> CatalogueDelta:
    """The full catalogue."""
    return CatalogueDelta(
        epoch=world.epoch,
        version=world.version,
        full=True,
        models=tuple(_entry(world, model) for model in world.models.values()),
        tenants=tuple(tenant_entry(tenant) for tenant in world.tenants.values()),
        settings=front_settings(world.settings, tuple(world.tenants.values())),
    )


def _entry(world: World, model: Model) -> ModelEntry:
    """Entry of a model; a minimal one, to reject its requests, if it is quarantined and has no full entry."""
    if model.name not in list_quarantined_models(world):
        return model_entry(model)
    made = attempt(lambda: model_entry(model))
    if isinstance(made, Failure):
        return ModelEntry(name=model.name, served_name=model.name, tenants=model.spec.tenants)
    return made


def catalogue_delta(before: World, after: World) -> CatalogueDelta | None:
    """Changes of the catalogue; None if there are none."""
    if before.epoch != after.epoch:
        return catalogue_full(after)
    if before.models is after.models and before.tenants is after.tenants and before.settings is after.settings:
        return None
    old, new = catalogue_full(before), catalogue_full(after)
    models_old = {entry.name: entry for entry in old.models}
    tenants_old = {entry.name: entry for entry in old.tenants}
    delta = CatalogueDelta(
        epoch=after.epoch,
        version=after.version,
        models=tuple(entry for entry in new.models if models_old.get(entry.name) != entry),
        models_gone=tuple(sorted(models_old.keys() - after.models.keys())),
        tenants=tuple(entry for entry in new.tenants if tenants_old.get(entry.name) != entry),
        tenants_gone=tuple(sorted(tenants_old.keys() - {entry.name for entry in new.tenants})),
        settings=new.settings if new.settings != old.settings else None,
    )
    said = delta.models or delta.models_gone or delta.tenants or delta.tenants_gone or delta.settings
    return delta if said else None
