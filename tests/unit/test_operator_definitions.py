"""What an operator says about the cluster's CRDs when it starts to lead."""

from __future__ import annotations

import pytest

from operator_world import older_definition
from spottrain_api import crd
from spottrain_operator.kube.errors import ForbiddenError
from spottrain_operator.kube.resources import DEFINITIONS
from spottrain_operator.objects.definitions import warn_of_other_definitions
from world.cluster import MemoryCluster
from world.faults import Fault


async def test_an_older_crd_is_reported_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    cluster = MemoryCluster()
    cluster.other_definitions[crd.NAME] = older_definition()
    await warn_of_other_definitions(cluster)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"the CRD {crd.NAME} is that of another version. Upgrade the release")


@pytest.mark.parametrize("error", [None, ForbiddenError("forbidden")], ids=["this release's", "forbidden"])
async def test_nothing_else_is_reported(error: ForbiddenError | None, caplog: pytest.LogCaptureFixture) -> None:
    cluster = MemoryCluster()
    cluster.before.append(Fault(error=error, resource=DEFINITIONS))
    await warn_of_other_definitions(cluster)
    assert not caplog.records
