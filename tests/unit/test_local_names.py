"""The hosts file: which names point where."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spottrain_local.gateway import NameServer
from spottrain_local.layout import ClusterLayout
from spottrain_local.names import hosts_file
from spottrain_local.supervisor import Supervisor


def service(name: str = "control", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team"}, "spec": {"selector": {"app": "x"}, **spec}}


def pod(
    address: str | None = "127.16.1.2",
    *,
    ready: bool = True,
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    namespace: str = "team",
    deleting: bool = False,
    **spec: Any,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "p", "namespace": namespace, "labels": labels or {"app": "x"}}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    status = {"phase": phase, "conditions": conditions} | ({"podIP": address} if address else {})
    return {"metadata": metadata, "spec": spec, "status": status}


def test_a_ready_pod_has_the_names_of_its_service() -> None:
    assert "127.16.1.2 control.team control.team.svc control.team.svc.cluster.local\n" in hosts_file(
        [service()], [pod()]
    )


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(pod(ready=False), id="not ready"),
        pytest.param(pod(None), id="no address yet"),
        pytest.param(pod(deleting=True), id="being deleted"),
        pytest.param(pod(phase="Succeeded"), id="ended"),
        pytest.param(pod(labels={"app": "y"}), id="not selected"),
        pytest.param(pod(namespace="another"), id="another namespace"),
    ],
)
def test_other_pods_have_not(other: dict[str, Any]) -> None:
    assert "control" not in hosts_file([service()], [other])


def test_early_addresses_where_the_service_says_so() -> None:
    assert "127.16.1.2 control.team" in hosts_file([service(publishNotReadyAddresses=True)], [pod(ready=False)])


def test_a_service_without_selector_has_no_names() -> None:
    assert "control" not in hosts_file([service(selector=None)], [pod()])


def test_pods_of_a_headless_service_have_names_of_their_own() -> None:
    text = hosts_file([service("job")], [pod(hostname="worker-0", subdomain="job")])
    assert "127.16.1.2 worker-0.job.team worker-0.job.team.svc worker-0.job.team.svc.cluster.local\n" in text


def test_names_that_can_not_be_written_are_written_later(tmp_path: Path) -> None:
    layout = ClusterLayout(root=tmp_path / "state")
    supervisor: Any = SimpleNamespace(name_server=NameServer(), layout=layout)
    Supervisor._write_hosts(supervisor, "127.16.1.2 control.team\n")
    layout.root.mkdir()
    layout.hosts.touch()
    Supervisor._write_hosts(supervisor, "127.16.1.2 control.team\n")
    assert layout.hosts.read_text() == "127.16.1.2 control.team\n"
