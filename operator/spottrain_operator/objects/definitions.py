"""The CRDs that the cluster serves, compared with those of this release."""

from __future__ import annotations

import asyncio
import logging

from spottrain_api import crd
from spottrain_api.contract.names import VERSION
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.resources import DEFINITIONS, Manifest

logger = logging.getLogger(__name__)

# As Helm itself: with another manager of the fields, Helm fails on a conflict if the release takes the CRD over.
APPLY_CRD = (
    "helm template CHART --show-only templates/crds.yaml | "
    "kubectl apply --server-side --force-conflicts --field-manager=helm -f -"
)


async def warn_of_other_definitions(cluster: Cluster) -> None:
    """Log what is wrong with the cluster's CRDs.

    An older CRD drops the fields that it doesn't know from specs and statuses, without a word. If the CRDs can't be
    read, nothing is said: training does not depend on this.
    """
    for name in crd.definitions():
        try:
            found = await cluster.get(DEFINITIONS, name)
        except ClusterError as error:
            logger.debug("the CRD %s can't be read: %s", name, error)
            continue
        # It takes a tenth of a second, in which agents wait.
        if problem := await asyncio.to_thread(crd_problem, found, name):
            logger.warning("%s", problem)


def crd_problem(found: Manifest | None, name: str) -> str:
    """What is wrong with a CRD, compared with that of this release."""
    if found is None:
        return f"this cluster has no CRD {name}. Upgrade the release with crds.enabled=true, or apply it: {APPLY_CRD}"
    expected = crd.definitions()[name]["spec"]["versions"][0]
    version = next((each for each in found["spec"]["versions"] if each["name"] == VERSION), None)
    if version is None or not version["served"]:
        return f"the CRD {name} does not serve {VERSION}. Apply that of this version: {APPLY_CRD}"
    if version["schema"] != expected["schema"]:
        return (
            f"the CRD {name} is that of another version. "
            f"Upgrade the release that installs the CRDs (crds.enabled), or apply that of this version: {APPLY_CRD}"
        )
    return ""
