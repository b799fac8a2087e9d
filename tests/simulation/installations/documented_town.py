"""An installation whose documents are custom resources on a simulated API server, and which writes statuses."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from autoscaler.controller.loop import Loop
from autoscaler.spec.model import Model
from autoscaler.spec.quantity import BytesOrAuto
from autoscaler.state.events import DocumentsSeen
from autoscaler.state.world import World
from tests.simulation.environment.api_server import Server
from tests.simulation.installations.installation import Autoscaler, Town
from tests.simulation.installations.model_objects import DocumentTasks, ModelObjects

TASKS = 60
"""Maximum number of tasks, and of timers, that read and write objects."""


class DocumentedTown(Town):
    """The installation."""

    def __init__(self, seed: int, *, models: tuple[Model, ...], **more: Any) -> None:
        self.objects = ModelObjects(Server())
        models = tuple(map(_documented, models))
        for one in models:
            self.objects.put(one.name, one.spec)
        super().__init__(seed, models=models, **more)
        self.further_tasks = TASKS

    def document_tasks(self, loop: Loop, who: str) -> DocumentTasks:
        """The tasks that read the objects."""
        return DocumentTasks(self.objects.server, loop, who, DocumentsSeen(tenants=self.tenants))

    def edit(self, model: Model) -> None:
        """Change the document of a Model in a field that does not affect its replicas."""
        spec = self.objects.spec(model.name)
        self.objects.put(model.name, {**spec, "unlisted": not spec.get("unlisted", False)})

    def outdated(self, model: Model) -> str:
        """Why the document or the status of a Model is outdated; empty: it is not."""
        if self.autoscaler is None:
            return "no autoscaler runs"
        world, name = self.autoscaler.loop.world, model.name
        if not self._is_in_force(world, model):
            return "the document in force is outdated"
        shown, generation = self.objects.observed_generation(name)
        if shown != generation:
            return f"its status shows generation {shown}, not {generation}"
        faulty = self.objects.conditions(name).get("Faulty")
        return "" if faulty == "False" else f"its status shows condition Faulty {faulty}"

    def _is_in_force(self, world: World, model: Model) -> bool:
        document = world.models.get(model.name)
        expected = replace(model.spec, unlisted=bool(self.objects.spec(model.name).get("unlisted")))
        return document is not None and document.spec == expected

    def unreadable(self) -> list[str]:
        """Objects that the leader could not read."""
        reader = self.autoscaler
        assert reader is None or isinstance(reader, Autoscaler)
        return [] if reader is None or reader.documents is None else reader.documents.unreadable()


def _documented(model: Model) -> Model:
    """The Model, defined completely by its document."""
    gpu = replace(model.spec.gpu, growth_percent=None, memory_bytes=BytesOrAuto(model.memory_bytes))
    return replace(model, spec=replace(model.spec, gpu=gpu, slots=model.slots))
