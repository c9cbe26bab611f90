"""The environment of an operator that runs as a process on this machine."""

from __future__ import annotations

from pathlib import Path


def operator_environment(
    kubeconfig: Path, namespace: str, *, port: int, health_port: int, metrics_port: int, identity: str = "operator-0"
) -> dict[str, str]:
    """What the chart sets in the operator's pod, for these ports of the loopback address."""
    return {
        "KUBECONFIG": str(kubeconfig),
        "SPOTTRAIN_CONTROL_URL": f"https://127.0.0.1:{port}",
        "SPOTTRAIN_CONTROL_HOST": "127.0.0.1",
        "SPOTTRAIN_CONTROL_PORT": str(port),
        "SPOTTRAIN_HEALTH_PORT": str(health_port),
        "SPOTTRAIN_METRICS_PORT": str(metrics_port),
        "POD_NAMESPACE": namespace,
        "POD_NAME": identity,
    }
