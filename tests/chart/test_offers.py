"""Offers of the example values with capacity providers: each provider only its own, and no impossible node."""

from __future__ import annotations

from autoscaler.documents import parse
from autoscaler.placement.model.prices import Prices
from autoscaler.providers.provisioning_request.provider import ProvisioningProvider
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import Offer
from autoscaler.state.world import World
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.worlds import device
from tests.support.chart import example, named
from tests.support.fakes.kubernetes.kube_objects import PlayedServer

ACCELERATOR, POOL = "cloud.google.com/gke-accelerator", "cloud.google.com/gke-nodepool"
RELEASE = "pl-pilotlight-settings"


def settings_of(file: str) -> Settings:
    """Return the Settings as the chart renders and the autoscaler reads them."""
    data = named(example(file), "ConfigMap", RELEASE)["data"]
    return parse.parse_documents([("settings.yaml", data["settings.yaml"])]).settings


async def offers_of(settings: Settings) -> dict[str, tuple[Offer, ...]]:
    """Return the offers by provider, before any order."""
    world = World(epoch=1, settings=settings)
    server = PlayedServer(lambda: 0.0)
    return {
        one.name: await ProvisioningProvider(
            one, server, "engines", lambda: world, lambda model: None, lambda: 0.0
        ).offers()
        for one in settings.capacity
    }


def test_two_gke_providers_in_one_settings_file_offer_only_their_own_nodes() -> None:
    found = run(offers_of(settings_of("values-gke-dws.yaml")))
    fields = {
        name: [(one.product, one.devices_min, one.labels, one.bought, one.price_per_hour) for one in offers]
        for name, offers in found.items()
    }
    h100 = {POOL: "dws-h100", ACCELERATOR: "nvidia-h100-80gb"}
    assert fields == {
        "atomic": [("NVIDIA-L4", 1, {ACCELERATOR: "nvidia-l4"}, "on-demand", 0.71)],
        "dws": [("NVIDIA-H100-80GB-HBM3", 8, h100, "flex", 5.0)],
    }
    ((atomic,), (dws,)) = found.values()
    assert (atomic.expected_s, atomic.lasts_s, dws.expected_s, dws.lasts_s) == (240.0, None, None, 604_800.0)


def test_gke_flex_start_node_is_priced_but_an_existing_node_is_free() -> None:
    prices = Prices(settings_of("values-gke-dws.yaml").prices)
    labels = {ACCELERATOR: "nvidia-h100-80gb"}
    stays = device(product="NVIDIA-H100-80GB-HBM3", labels=labels)
    comes = device(product="NVIDIA-H100-80GB-HBM3", labels={**labels, "cloud.google.com/gke-flex-start": "true"})
    assert (prices.of(stays), prices.of(comes)) == (0.0, 5.0)
