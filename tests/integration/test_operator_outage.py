"""The API server goes away for longer than the operator's lease lasts.

Then it comes back.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cluster_fixtures import Kubectl, processes_of, wait_for
from operator_process import Jobs, running

pytestmark = pytest.mark.cluster

CRDS = Path(__file__).parents[2] / "crds"


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
    local_cluster: Any, kubectl: Kubectl, tmp_path: Path
) -> None:
    namespace = f"outage-{uuid4().hex[:8]}"
    kubectl("apply", "--server-side", "-f", str(CRDS))
    wait_for(lambda: kubectl.run("get", "tj").returncode == 0, "the CRD is served")
    kubectl("create", "namespace", namespace)
    jobs = Jobs(kubectl, namespace)
    with running(kubectl, namespace, tmp_path) as operator:
        jobs.apply("gpt")
        wait_for(lambda: len(jobs.pods("gpt")) == 3, "the job has its pods")
        pods = {pod["metadata"]["uid"] for pod in jobs.pods("gpt")}

        with stopped_api_server(local_cluster.layout.root):
            wait_for(lambda: operator.readiness() == 503, "the operator stops acting, for another may lead")
        operator.wait_ready()
        assert operator.process is not None
        assert operator.process.poll() is None
        assert "leads on" in operator.log()
        assert {pod["metadata"]["uid"] for pod in jobs.pods("gpt")} == pods

        patch = ("--type=merge", "-p", '{"spec": {"runPolicy": {"suspend": true}}}')
        kubectl("patch", "tj", "gpt", "-n", namespace, *patch)
        wait_for(lambda: not jobs.pods("gpt"), "the operator acts again")
    kubectl.run("delete", "namespace", namespace, "--wait=false")
