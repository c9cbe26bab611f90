"""Settings of the ranks, each defined once.

The spec of a TrainingJob and the messages for ranks are made of these models. In a spec, unknown fields are refused.
In a message, they are ignored.
"""

from spottrain_api.settings.checkpoint import CheckpointConfig
from spottrain_api.settings.choices import (
    AUTO_INTERVAL,
    INTERVAL_PATTERN,
    OnNotice,
    Precision,
    Sharding,
    StabilityAction,
    Strategy,
)
from spottrain_api.settings.entrypoint import Entrypoint
from spottrain_api.settings.resource import Argument, FreeForm, Line, Resource
from spottrain_api.settings.stability import LossSpikeConfig, StabilityConfig
from spottrain_api.settings.training import Batch, DeepSpeedConfig, FsdpConfig, TrainingSettings

__all__ = [
    "AUTO_INTERVAL",
    "INTERVAL_PATTERN",
    "Argument",
    "Batch",
    "CheckpointConfig",
    "DeepSpeedConfig",
    "Entrypoint",
    "FreeForm",
    "FsdpConfig",
    "Line",
    "LossSpikeConfig",
    "OnNotice",
    "Precision",
    "Resource",
    "Sharding",
    "StabilityAction",
    "StabilityConfig",
    "Strategy",
    "TrainingSettings",
]
