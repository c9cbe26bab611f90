"""The kubelet's `/metrics/resource`: what metrics-server reads for `kubectl top`."""

import os
from collections.abc import Iterable, Iterator
from datetime import datetime

from spottrain_local.node.containers import Running
from spottrain_local.node.pod_worker import PodWorker
from spottrain_local.node.usage import Usage, usage_of_tree

# metrics-server takes a counter of 0 for a missing one.
_LEAST_SECONDS = 0.001

Sample = tuple[str, dict[str, str], float]


def resource_metrics(pods: Iterable[PodWorker], now: float) -> str:
    """Return the usage of this node, its pods and their containers.

    The format is Prometheus'. `now` is in seconds since 1970.
    """
    samples = [*_usage("node", {}, usage_of_tree(os.getpid()))]
    for pod in pods:
        samples += _pod(pod)
    lines: list[str] = []
    for name in sorted({sample[0] for sample in samples}):
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        for _, labels, value in (sample for sample in samples if sample[0] == name):
            text = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels))
            lines.append(f"{name}{{{text}}} {value!r} {now * 1000:.0f}")
    return "\n".join([*lines, ""])


def _pod(pod: PodWorker) -> Iterator[Sample]:
    metadata = pod.context.pod["metadata"]
    labels = {"namespace": metadata["namespace"], "pod": metadata["name"]}
    total = Usage()
    for worker in pod.workers:
        usage, state = worker.usage(), worker.record.state
        if usage is None or not isinstance(state, Running):
            continue
        total += usage
        own = labels | {"container": worker.record.name}
        yield from _usage("container", own, usage)
        yield "container_start_time_seconds", own, datetime.fromisoformat(state.started_at).timestamp()
    if total.memory_bytes:
        yield from _usage("pod", labels, total)


def _usage(subject: str, labels: dict[str, str], usage: Usage) -> Iterator[Sample]:
    yield f"{subject}_cpu_usage_seconds_total", labels, usage.cpu_seconds + _LEAST_SECONDS
    yield f"{subject}_memory_working_set_bytes", labels, float(usage.memory_bytes)
