"""Histograms of each job.

They take a small part of the memory of prometheus_client's own, which has an object with a lock for each bucket: 63
for each job.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from spottrain_operator.job_families import JOB
from spottrain_operator.kube.identities import JobKey


class JobHistogram(Collector):
    """A histogram with a series for each job.

    Args:
        name: Of the metric.
        documentation: Its help text.
        buckets: Upper bounds in rising order, without that of the last bucket, which is infinite.
        registry: Shows it.
    """

    def __init__(
        self, name: str, documentation: str, buckets: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = buckets
        self._bucket_names = [*map(floatToGoString, buckets), "+Inf"]
        # Of each job the number of values in each bucket, and then the sum of the values.
        self._jobs: dict[JobKey, array[float]] = {}
        registry.register(self)

    def show(self, key: JobKey) -> None:
        """Show a job from now on, with no values at first.

        Prometheus' rate() leaves out the first value of a series.
        """
        self._values(key)

    def observe(self, key: JobKey, value: float) -> None:
        """Count a value of a job, and show it."""
        values = self._values(key)
        values[bisect_left(self._bounds, value)] += 1
        values[-1] += value

    def _values(self, key: JobKey) -> array[float]:
        if (values := self._jobs.get(key)) is None:
            values = self._jobs[key] = array("d", bytes(8 * (len(self._bucket_names) + 1)))
        return values

    def forget(self, key: JobKey) -> None:
        """Drop the series of a job, also from a thread other than the one that observes."""
        self._jobs.pop(key, None)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """A scrape runs in a thread, while passes observe."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=JOB)
        for key, values in list(self._jobs.items()):
            total, buckets = 0.0, []
            for name, number in zip(self._bucket_names, values[:-1], strict=True):
                total += number
                buckets.append((name, total))
            family.add_metric((key.namespace, key.name), buckets, values[-1])
        yield family
