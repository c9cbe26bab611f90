"""Every metric of the operator and the watcher.

They come from the registries that /metrics of the two shows.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Metric

from spottrain_operator.job_families import JOB
from spottrain_operator.metrics import Metrics
from spottrain_watcher.metrics import Metrics as WatcherMetrics

from .markdown import code, entry

PREFIX = "spottrain_"
# Labels of families that were collected without samples.
_LABELS = {
    "spottrain_reconcile_errors": ("kind",),
    "spottrain_watcher_notices": ("source", "kind"),
    "spottrain_watcher_polls": ("result",),
}


def families(registry: CollectorRegistry) -> list[Metric]:
    """The metrics of the project itself, in the order of their names."""
    ours = (each for each in registry.collect() if each.name.startswith(PREFIX))
    return sorted(ours, key=lambda each: each.name)


def exposed_name(family: Metric) -> str:
    """As Prometheus stores it."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def metrics() -> str:
    """An entry for each of the operator's."""
    return _entries(Metrics(num_agents=lambda: 0).registry)


def watcher_metrics() -> str:
    """An entry for each of the watcher's."""
    return _entries(WatcherMetrics(()).registry)


def _entries(registry: CollectorRegistry) -> str:
    return "\n".join(
        entry(
            exposed_name(family),
            family.documentation,
            family.type,
            "labels " + ", ".join(map(code, labels(family))) if labels(family) else "",
        )
        for family in families(registry)
    )


def labels(family: Metric) -> tuple[str, ...]:
    """Of a family that was collected without samples."""
    declared = tuple(getattr(family, "_labelnames", ()))
    if not declared and family.name.startswith(f"{PREFIX}job_"):
        return JOB
    return declared or _LABELS.get(family.name, ())
