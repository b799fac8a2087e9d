"""The NVIDIA device plug-in's ConfigMap, and which part of it is whose. Pure.

Owns where it may be and how a node's part is chosen: the node's label names the key; without one it is the key
`default`, or the only key there is, as the plug-in's own chart has it. The GPU operator chooses otherwise, so of its
ConfigMaps only what a label names counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from autoscaler.kubernetes.api import Object
from autoscaler.kubernetes.constants import PLACES, ConfigMapLocation
from autoscaler.spec.yaml import YamlError
from autoscaler.spec.yaml import parse_yaml as read_yaml

_log = logging.getLogger(__name__)

CHOICE = "nvidia.com/device-plugin.config"
"""A node's label: the key of its configuration."""
DEFAULT = "default"


Configs = Mapping[str, Mapping[str, Any]]
"""Key -> configuration, parsed."""


def read_plugin_configs(config_map: Object) -> Configs:
    """Its keys; one that is no configuration is said in the log and left out."""
    found = dict[str, Mapping[str, Any]]()
    for key, text in (config_map.get("data") or {}).items():
        try:
            found[key] = _config(text)
        except YamlError as error:
            name = config_map["metadata"]["name"]
            _log.warning("no configuration of a device plug-in config_map=%s key=%s error=%s", name, key, error)
    return found


def _config(text: str) -> Mapping[str, Any]:
    parsed = read_yaml(text)
    if len(parsed) != 1 or not isinstance(parsed[0], dict):
        raise YamlError("expected one mapping")
    return parsed[0]


def select_plugin_config(labels: Mapping[str, str], there: Mapping[ConfigMapLocation, Configs]) -> Mapping[str, Any]:
    """What the plug-in of a node with these labels was told; empty: that is not known."""
    for place in PLACES:
        configs = there.get(place)
        if configs is not None:
            key = labels.get(CHOICE) or ("" if place.by_label_only else _without_label(configs))
            if key in configs:
                return configs[key]
    return {}


def _without_label(configs: Configs) -> str:
    return DEFAULT if DEFAULT in configs or len(configs) != 1 else next(iter(configs))
