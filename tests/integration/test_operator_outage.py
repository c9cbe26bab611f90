"""The API server goes away for longer than the operator's lease lasts.

Then it comes back.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster_fixtures import Kubectl, processes_of, wait_for
from operator_process import Jobs, led_namespace, running
from spottrain_local.cluster import Cluster

pytestmark = pytest.mark.cluster


@contextmanager
def stopped_api_server(root: Path) -> Iterator[None]:
    """Stop the process of the API server while the block runs.

    Connections hang, and nothing is answered.
    """
    [server] = [each for each in processes_of(root) if each.info["name"] == "kube-apiserver"]
    server.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


def test_the_operator_outlives_an_outage_of_the_api_server(
    whole_cluster: Cluster, whole_kubectl: Kubectl, tmp_path: Path
) -> None:
    with running(whole_kubectl, tmp_path) as operator, led_namespace(operator) as namespace:
        jobs = Jobs(whole_kubectl, namespace)
        jobs.apply("gpt")
        wait_for(lambda: len(jobs.pods("gpt")) == 3, "the job has its pods")
        pods = {pod["metadata"]["uid"] for pod in jobs.pods("gpt")}

        with stopped_api_server(whole_cluster.layout.root):
            wait_for(lambda: operator.readiness() == 503, "the operator stops acting, for another may lead")
        operator.wait_ready()
        assert operator.process is not None
        assert operator.process.poll() is None
        assert "leads on" in operator.log()
        assert {pod["metadata"]["uid"] for pod in jobs.pods("gpt")} == pods

        jobs.edit("gpt", runPolicy={"suspend": True})
        wait_for(lambda: not jobs.pods("gpt"), "the operator acts again")
