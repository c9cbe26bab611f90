"""What an operator says about the cluster's CRDs when it starts to lead."""

from __future__ import annotations

import pytest

from memory_cluster import MemoryCluster
from operator_world import older_definition
from spottrain_api import crd
from spottrain_operator.kube.errors import ForbiddenError
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.definitions import warn_of_other_definitions


class Forbidding(MemoryCluster):
    async def read_definition(self, name: str) -> Manifest | None:
        raise ForbiddenError(f'customresourcedefinitions "{name}" is forbidden')


async def test_an_older_crd_is_told_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    cluster = MemoryCluster()
    cluster.other_definitions[crd.NAME] = older_definition()
    await warn_of_other_definitions(cluster)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"the CRD {crd.NAME} is that of another version. Upgrade the release")


@pytest.mark.parametrize("cluster", [MemoryCluster(), Forbidding()], ids=["this release's", "forbidden"])
async def test_nothing_else_is_told(cluster: MemoryCluster, caplog: pytest.LogCaptureFixture) -> None:
    await warn_of_other_definitions(cluster)
    assert not caplog.records
