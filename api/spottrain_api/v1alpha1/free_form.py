"""The parts of a spec that belong to other APIs: the CRD leaves them open."""

from __future__ import annotations

import json
from typing import Any

from spottrain_api.v1alpha1.spec import TrainingJobSpec

# Characters of JSON. The operator keeps each job in memory, and copies these parts into pods and assignments.
MOST_FREE_FORM = 65_536
# Levels of objects and lists in each other. Parsers refuse some two hundred.
MOST_LEVELS = 50


def too_large(spec: TrainingJobSpec) -> tuple[str, ...]:
    """Paths of the free-form parts above MOST_FREE_FORM or MOST_LEVELS.

    The API server can't refuse them: CEL measures no free-form object.
    """
    parts = {
        "deepspeed.config": spec.deepspeed.config,
        "podTemplate.volumes": [volume.to_dict() for volume in spec.pod_template.volumes],
    }
    return tuple(path for path, part in parts.items() if len(json.dumps(part)) > MOST_FREE_FORM or _is_deep(part))


def _is_deep(part: Any, most: int = MOST_LEVELS) -> bool:
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return most < 0 or any(_is_deep(each, most - 1) for each in inner)
