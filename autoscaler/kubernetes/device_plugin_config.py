"""The configurations of NVIDIA's device plug-in, and the ConfigMaps in which they may be. Pure.

The node's label names its part of the ConfigMap of the NVIDIA device plug-in. Without a label it is the key `default`,
or the only key, as in the plug-in's chart. The GPU operator has another rule, so from its ConfigMaps only a key named
by a label is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from autoscaler.kubernetes.api import Object
from autoscaler.spec.yaml import YamlError
from autoscaler.spec.yaml import parse_yaml as read_yaml


class ConfigMapLocation(NamedTuple):
    """Where a ConfigMap may be found."""

    namespace: str
    name: str
    by_label_only: bool = False

    @property
    def query(self) -> dict[str, str]:
        """Selects only this ConfigMap, so that a permission limited to its name is enough."""
        return {"fieldSelector": f"metadata.name={self.name}"}


PLACES = (
    ConfigMapLocation("kube-system", "nvidia-device-plugin"),
    ConfigMapLocation("gpu-operator", "time-slicing-config", by_label_only=True),
    ConfigMapLocation("gpu-operator", "time-slicing-config-all", by_label_only=True),
)
"""The ConfigMap of the device plug-in, and those that the GPU operator's documentation names. The first one that has
the key is used."""


CHOICE = "nvidia.com/device-plugin.config"
"""Node label: the key of its configuration."""


DEFAULT = "default"


Configs = Mapping[str, Mapping[str, Any]]
"""Key -> configuration, parsed."""


_log = logging.getLogger("pilotlight.autoscaler.inventory")


def read_plugin_configs(config_map: Object) -> Configs:
    """Parse all keys; one that is not a configuration is logged and left out."""
    found = dict[str, Mapping[str, Any]]()
    for key, text in (config_map.get("data") or {}).items():
        try:
            found[key] = _config(text)
        except YamlError as error:
            name = config_map["metadata"]["name"]
            _log.warning("event=plugin_config_invalid config_map=%s key=%s error=%s", name, key, error)
    return found


def _config(text: str) -> Mapping[str, Any]:
    parsed = read_yaml(text)
    if len(parsed) != 1 or not isinstance(parsed[0], dict):
        raise YamlError("expected one mapping")
    return parsed[0]


def select_plugin_config(labels: Mapping[str, str], there: Mapping[ConfigMapLocation, Configs]) -> Mapping[str, Any]:
    """Return the configuration of the plug-in on a node with these labels; empty if unknown."""
    for place in PLACES:
        configs = there.get(place)
        if configs is not None:
            single = DEFAULT if DEFAULT in configs or len(configs) != 1 else next(iter(configs))
            key = labels.get(CHOICE) or ("" if place.by_label_only else single)
            if key in configs:
                return configs[key]
    return {}
