"""The parts of a spec that belong to other APIs, and that the CRD therefore leaves open."""

from __future__ import annotations

import json

from spottrain_api.v1alpha1.spec import TrainingJobSpec

# Characters of JSON. The operator keeps each job in memory, and copies these parts into pods and assignments.
MOST_FREE_FORM = 65_536


def too_large(spec: TrainingJobSpec) -> tuple[str, ...]:
    """Paths of the free-form parts that hold more than MOST_FREE_FORM.

    The API server can't refuse them: CEL measures no free-form object.
    """
    parts = {
        "deepspeed.config": spec.deepspeed.config,
        "podTemplate.volumes": [volume.to_dict() for volume in spec.pod_template.volumes],
    }
    return tuple(path for path, part in parts.items() if len(json.dumps(part)) > MOST_FREE_FORM)
