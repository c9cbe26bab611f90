"""What a node's labels say about how it goes."""

from __future__ import annotations

import pytest

from spottrain_api.contract import LABEL_SHUTDOWN_GRACE, shutdown_grace_seconds


@pytest.mark.parametrize(
    ("labels", "seconds"),
    [
        ({}, None),
        ({"eks.amazonaws.com/capacityType": "SPOT"}, None),
        ({"cloud.google.com/gke-spot": "true"}, 15),
        ({"cloud.google.com/gke-preemptible": "true"}, 15),
        ({"cloud.google.com/gke-spot": "false"}, None),
        ({"cloud.google.com/gke-spot": "true", LABEL_SHUTDOWN_GRACE: "105"}, 105),
        ({"cloud.google.com/gke-spot": "true", LABEL_SHUTDOWN_GRACE: "soon"}, 15),
    ],
    ids=str,
)
def test_the_grace_of_a_nodes_shutdown(labels: dict[str, str], seconds: float | None) -> None:
    assert shutdown_grace_seconds(labels) == seconds
