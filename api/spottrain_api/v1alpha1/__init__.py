"""TrainingJob, spottrain.dev/v1alpha1: what the user asks for (spec) and what the operator reports (status).

These models are the single source of the CRD: `python -m spottrain_api.crd` generates crds/ from them, with their
descriptions, defaults, bounds and CEL rules. Keys are camelCase in YAML.
"""

from spottrain_api.contract import INTERVAL_PATTERN, OnNotice, Precision, Sharding, Strategy
from spottrain_api.v1alpha1.capacity import (
    MAX_MEMBERS,
    Capacity,
    Fallback,
    FallbackPolicy,
    Nodes,
    OnDemandCapacity,
    Pool,
    PoolProvider,
    SpotCapacity,
)
from spottrain_api.v1alpha1.checkpoint import Checkpoint
from spottrain_api.v1alpha1.pod_template import (
    EntrypointSpec,
    EnvVar,
    EnvVarSource,
    KeySelector,
    PodTemplate,
    Resources,
    Toleration,
    Volume,
    VolumeMount,
)
from spottrain_api.v1alpha1.resource import FreeForm, Resource
from spottrain_api.v1alpha1.spec import RunPolicy, TrainingJobSpec
from spottrain_api.v1alpha1.stability import LossSpike, Stability
from spottrain_api.v1alpha1.status import (
    FINISHED_PHASES,
    PRINTER_COLUMNS,
    Condition,
    CostStatus,
    Counts,
    GenerationState,
    GenerationStatus,
    Phase,
    ProgressStatus,
    StatusResource,
    TrainingJobStatus,
    Transition,
)
from spottrain_api.v1alpha1.training import Batch, DeepSpeed, Fsdp

__all__ = [
    "FINISHED_PHASES",
    "INTERVAL_PATTERN",
    "MAX_MEMBERS",
    "PRINTER_COLUMNS",
    "Batch",
    "Capacity",
    "Checkpoint",
    "Condition",
    "CostStatus",
    "Counts",
    "DeepSpeed",
    "EntrypointSpec",
    "EnvVar",
    "EnvVarSource",
    "Fallback",
    "FallbackPolicy",
    "FreeForm",
    "Fsdp",
    "GenerationState",
    "GenerationStatus",
    "KeySelector",
    "LossSpike",
    "Nodes",
    "OnDemandCapacity",
    "OnNotice",
    "Phase",
    "PodTemplate",
    "Pool",
    "PoolProvider",
    "Precision",
    "ProgressStatus",
    "Resource",
    "Resources",
    "RunPolicy",
    "Sharding",
    "SpotCapacity",
    "Stability",
    "StatusResource",
    "Strategy",
    "Toleration",
    "TrainingJobSpec",
    "TrainingJobStatus",
    "Transition",
    "Volume",
    "VolumeMount",
]
