"""The jobs that worlds run."""

from __future__ import annotations

from spottrain_api.v1alpha1.spec import TrainingJobSpec


def spec_of(**changes: object) -> TrainingJobSpec:
    """A small job on up to six nodes, two of them on-demand."""
    fields: dict[str, object] = {
        "image": "train:1",
        "entrypoint": {"script": "train.py"},
        "nodes": {"min": 1, "max": 6},
        "capacity": {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}},
        "batch": {"global": 64},
        "checkpoint": {"uri": "s3://bucket/job"},
    }
    return TrainingJobSpec.model_validate(fields | changes)
