"""Builds the catalogue for gateways: entries made of Model, Tenant and Settings documents. Pure.

An entry contains the names, permissions, queue limits, timeouts and engine behaviour of a document. Fields that only
the autoscaler needs (weights, memory, commands, environment) are left out.
"""

from __future__ import annotations

from collections.abc import Collection

from autoscaler.contract import AdapterEntry, Clocks, FrontSettings, KeyEntry, ModelEntry, QueueLimits, TenantEntry
from autoscaler.spec.engines import ENGINES, Adapters, fill_template
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Tenant, unix_seconds


def model_entry(model: Model) -> ModelEntry:
    """Entry of one model. `served_name` is the name that its engine serves and that request bodies carry."""
    spec, engine = model.spec, ENGINES[model.spec.engine]
    return ModelEntry(
        name=model.name,
        served_name=model.served(),
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
    """llama.cpp's selection of one adapter; all others get scale 0.

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
    )


def front_settings(settings: Settings, tenants: Collection[Tenant]) -> FrontSettings:
    """Settings of the inference port. `auth: auto` requires keys as soon as there is a Tenant document."""
    return FrontSettings(
        keys_needed=settings.auth == "keys" or (settings.auth == "auto" and bool(tenants)),
        keepalive_seconds=settings.stream.keepalive_seconds,
        silent_seconds_max=settings.silent_seconds_max,
        cors_origins=settings.cors.origins,
        hosts=settings.hosts,
    )
