"""Every metric, from the registry that /metrics shows."""

from __future__ import annotations

from prometheus_client import Metric

from spottrain_operator.metrics import Metrics
from spottrain_operator.status_metrics import JOB

from .markdown import code, entry

PREFIX = "spottrain_"


def families() -> list[Metric]:
    """The metrics of the project itself, in the order of their names."""
    collected = Metrics(num_agents=lambda: 0).registry.collect()
    return sorted((each for each in collected if each.name.startswith(PREFIX)), key=lambda each: each.name)


def exposed_name(family: Metric) -> str:
    """As Prometheus stores it."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def metrics() -> str:
    """An entry for each."""
    return "\n".join(
        entry(
            exposed_name(family),
            family.documentation,
            family.type,
            "labels " + ", ".join(map(code, labels(family))) if labels(family) else "",
        )
        for family in families()
    )


def labels(family: Metric) -> tuple[str, ...]:
    """Of a family that was collected without samples."""
    declared = tuple(getattr(family, "_labelnames", ()))
    if not declared and family.name.startswith(f"{PREFIX}job_"):
        return JOB
    return declared or (("kind",) if family.name == "spottrain_reconcile_errors" else ())
