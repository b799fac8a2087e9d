"""The status schemas of Model and Tenant for their CustomResourceDefinitions (interfaces, section 2). Pure data.

A status contains what the autoscaler shows and what it reads after a restart (`learned`). Only the autoscaler writes
it, so it has few bounds and no rules.
"""

from __future__ import annotations

from autoscaler.schema.structural import TEXT, Schema
from autoscaler.state.lifecycle import ReplicaState

_COUNT: Schema = {"type": "integer", "format": "int32", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TIME: Schema = {"type": "string", "format": "date-time"}


def to_camel_case(state: str) -> str:
    """Convert a state such as `falling-asleep` to a key."""
    first, *rest = state.split("-")
    return first + "".join(word.capitalize() for word in rest)


def _object(properties: dict[str, Schema], description: str, **more: object) -> Schema:
    return {"type": "object", "description": description, "properties": properties, **more}


_CONDITIONS: Schema = {
    "type": "array",
    "description": "The current conditions, one of each type.",
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
    "items": _object(
        {
            "type": {**TEXT, "maxLength": 316},
            "status": {**TEXT, "enum": ["True", "False", "Unknown"]},
            "reason": {**TEXT, "maxLength": 1024},
            "message": {**TEXT, "maxLength": 32_768},
            "lastTransitionTime": _TIME,
            "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
        },
        "A condition in the form of metav1.Condition.",
        required=["type", "status", "reason", "message", "lastTransitionTime"],
    ),
}
_OBSERVED: Schema = {
    "type": "integer",
    "format": "int64",
    "description": "The generation of the spec that this status describes.",
}
_LEARNED = _object(
    {
        "startSeconds": {"type": "array", "items": _NUMBER, "maxItems": 256},
        "tries": _COUNT,
        "episodes": _COUNT,
        "retryAt": _TIME,
        "refusedUntil": _TIME,
        "failure": TEXT,
        "lastActivity": _TIME,
    },
    "Measurements and back-offs that are kept over a restart of the autoscaler.",
)
MODEL = _object(
    {
        "observedGeneration": _OBSERVED,
        "replicas": _object(
            {to_camel_case(state): _COUNT for state in ReplicaState if state is not ReplicaState.GONE},
            "The number of replicas in each state.",
        ),
        "demand": _object(
            {"waiting": _COUNT, "running": _COUNT}, "The numbers of requests in the last reports of the gateways."
        ),
        "conditions": _CONDITIONS,
        "lastStart": _object(
            {
                "seconds": _NUMBER,
                "phases": {"type": "object", "additionalProperties": _NUMBER},
                "reason": TEXT,
            },
            "The last successful start of a replica: its duration, the duration of its phases, and its reason.",
        ),
        "learned": _LEARNED,
    },
    "The status of the Model. Only the autoscaler writes it.",
)
TENANT = _object(
    {"observedGeneration": _OBSERVED, "conditions": _CONDITIONS},
    "The status of the Tenant. Only the autoscaler writes it.",
)
