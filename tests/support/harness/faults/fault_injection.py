"""Faults that tests inject into the product. Every other contained fault is a failure
(`tests.support.harness.faults.contained_faults`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from autoscaler.contract import ModelName
from autoscaler.controller import loop
from autoscaler.spec.model import Model
from gateway.dispatch.effects import ModelFaulted
from gateway.dispatch.fair_queue import TenantQueue
from gateway.dispatch.model_dispatcher import ModelDispatcher


class InjectedError(Exception):
    """What `inject` raises."""


class Faults(NamedTuple):
    """What was injected, and what was contained."""

    reported: list[tuple[ModelName | None, str]]
    """(Model, what failed)."""
    stop: Callable[[], None]
    """Stops the injection."""


GATEWAY_POINTS = (
    *(
        f"gateway.dispatch.model_dispatcher:ModelDispatcher.{name}"
        for name in (
            "look",
            "settle",
            "arrive",
            "finish",
            "heard",
            "bounce",
            "expire",
            "_grant",
            "_release",
        )
    ),
    "gateway.dispatch.dispatcher:_times_s",
    "gateway.dispatch.routing_table:Routes._update",
)
"""Functions of the gateways' dispatch."""

POINTS = (
    "autoscaler.demand.desired_replicas:compute_desired_replicas",
    "autoscaler.planner.plan:reconcile_model",
    "autoscaler.planner.reconcile:build_placement_request",
    "autoscaler.planner.plan:compute_slots",
    "autoscaler.planner.plan:start_deadline_s",
    "autoscaler.placement.model.bin_builder:evictable_s",
    "autoscaler.routing.slots:_divide_model",
    "autoscaler.fold.replicas:apply_replica_observation",
    "autoscaler.demand.model_history:record_peak",
    "autoscaler.routing.catalogue:model_entry",
    "autoscaler.routing.routes:_state",
    *GATEWAY_POINTS,
    "tests.support.fakes.driver:FakeDriver.start",
    "tests.support.fakes.driver:FakeDriver.stop",
    "tests.support.fakes.driver:FakeDriver.obstacle",
)
"""Functions of the planner, the fold, the driver and the gateways' data; each takes one Model in some form."""

DOCUMENT_POINTS = (
    "autoscaler.documents.parse:_model",
    "autoscaler.spec.document_names:_settled",
    "pilotlight.models.cluster_model_memory:Sizes._make",
    "autoscaler.explain.model:_wanted",
    "autoscaler.explain.status_rows:_why",
    "autoscaler.server.read_responses:effective_idle_window",
    "autoscaler.provisioning.unplaceable_models:Fitting.never",
    "autoscaler.kubernetes.resources.model_status:build_status_input",
    "autoscaler.kubernetes.resources.model_status:render_status",
    "autoscaler.kubernetes.resources.status_writer:_Kept.see",
    "autoscaler.kubernetes.resources.status_writer:Statuses._apply",
)
"""The same for documents, explanations and statuses."""


def concerns(name: str) -> Callable[..., bool]:
    """Whether an argument is a Model of that name, its name, its document, a replica of it, or a list of these. A list
    of Effects concerns no Model: it collects those of all Models.
    """

    def names(one: object) -> object:
        if isinstance(one, ModelFaulted):
            return None
        if isinstance(one, list | tuple) and type(one) in (list, tuple):
            return names(one[0]) if one else None
        if isinstance(one, Model | ModelDispatcher):
            return one.name
        if isinstance(one, TenantQueue):
            return one.model
        if isinstance(one, dict):
            metadata = one.get("metadata")
            return metadata.get("name") if isinstance(metadata, dict) else None
        subject = getattr(one, "subject", one)  # of a status
        model = getattr(subject, "model", subject)
        return model.name if isinstance(model, Model) else model

    return lambda *args, **kwargs: any(names(one) == name for one in (*args, *kwargs.values()))


def inject(patch: pytest.MonkeyPatch, point: str, about: Callable[..., bool], *, expected: bool = True) -> Faults:
    """Makes the function `module:name` raise InjectedError when `about(*args, **kwargs)` is true. Each text differs.

    The faults that the loop contains from then on are recorded instead of failing the test.
    """
    module, _, name = point.partition(":")
    owner: Any = import_module(module)
    *path, last = name.split(".")
    for one in path:
        owner = getattr(owner, one)
    real, faults, calls = getattr(owner, last), Faults([], lambda: patch.setattr(owner, last, real)), itertools.count(1)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if about(*args, **kwargs):
            raise InjectedError(f"injected into {name}, call {next(calls)}")
        return real(*args, **kwargs)

    patch.setattr(owner, last, faulty)
    if expected:
        patch.setattr(loop, "report_fault", lambda model, what, reason: faults.reported.append((model, what)))
    return faults
