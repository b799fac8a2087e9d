"""Parses the ConfigMap of the NVIDIA device plug-in and selects the part for a node. Pure.

The node's label names the key. Without a label it is the key `default`, or the only key, as in the plug-in's chart. The
GPU operator has another rule, so from its ConfigMaps only a key named by a label is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.constants import PLACES, ConfigMapLocation
from autoscaler.spec.yaml import YamlError
from autoscaler.spec.yaml import parse_yaml as read_yaml

_log = logging.getLogger("pilotlight.autoscaler.inventory")

CHOICE = "nvidia.com/device-plugin.config"
"""Node label: the key of its configuration."""
DEFAULT = "default"


Configs = Mapping[str, Mapping[str, Any]]
"""Key -> configuration, parsed."""


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
            key = labels.get(CHOICE) or ("" if place.by_label_only else _without_label(configs))
            if key in configs:
                return configs[key]
    return {}


def _without_label(configs: Configs) -> str:
    return DEFAULT if DEFAULT in configs or len(configs) != 1 else next(iter(configs))
