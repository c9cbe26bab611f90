"""The watcher's Prometheus metrics.

Their labels are names of this project alone, so that nothing that a cloud or a user says can multiply the series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_watcher.kubernetes_signals import KubernetesSource
from spottrain_watcher.signal_source import SignalSource


def hears_cloud(sources: Sequence[SignalSource]) -> bool:
    """Whether the watcher follows a source beside Kubernetes.

    That source is the metadata of the node's cloud.
    """
    return any(source.name != KubernetesSource.name for source in sources)


class Metrics(Collector):
    """All metrics of one watcher, in their own registry.

    A scrape asks the sources how they are.
    """

    def __init__(self, sources: Sequence[SignalSource]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._sources = sources
        self._seen: set[tuple[str, str]] = set()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self._notices = Counter(
            "spottrain_watcher_notices",
            "Notices that a source has announced.",
            ("source", "kind"),
            registry=self.registry,
        )
        self._polls = Counter(
            "spottrain_watcher_polls",
            "Answered polls of agents: changed with notices or a trouble, unchanged without.",
            ("result",),
            registry=self.registry,
        )
        for source in sources:
            self.add(source)
        for result in ("changed", "unchanged"):
            self._polls.labels(result)
        cloud = Gauge(
            "spottrain_watcher_hears_cloud",
            "1 if a cloud's metadata is read; 0 if only Kubernetes' own signals are heard.",
            registry=self.registry,
        )
        cloud.set_function(lambda: float(hears_cloud(sources)))

    def add(self, source: SignalSource) -> None:
        """Start the series of a source."""
        # Prometheus' increase() leaves out the first value of a series: it has to be 0.
        for kind in NoticeKind:
            self._notices.labels(source.name, kind.value)

    def collect(self) -> Iterator[Metric]:
        """The sources at this moment."""
        up = GaugeMetricFamily("spottrain_watcher_source_up", "1 while the source answers.", labels=("source",))
        for source in self._sources:
            up.add_metric((source.name,), float(source.trouble is None))
        yield up

    def announced(self, source: SignalSource, notices: Sequence[Notice]) -> None:
        """Count the notices that are new."""
        before, now = self._seen, {(source.name, notice.id) for notice in notices}
        self._seen = {each for each in before if each[0] != source.name} | now
        for notice in notices:
            if (source.name, notice.id) not in before:
                self._notices.labels(source.name, notice.kind.value).inc()

    def answered(self, *, changed: bool) -> None:
        self._polls.labels("changed" if changed else "unchanged").inc()

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of /metrics."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
