"""What a job asks of a controller that a cluster may lack, and why it can't be had."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from spottrain_api.contract.conditions import ConditionReason
from spottrain_operator.core.trouble import Trouble
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import AlreadyExistsError, NotFoundError, RefusedError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import DEFINITIONS, Resource


def definition_of(resource: Resource) -> str:
    """The name of the resource's CRD."""
    return f"{resource.plural}.{resource.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A controller that administrators install, and what jobs ask of it.

    Attributes:
        resource: Of the objects by which they ask.
        oldest: The first release that serves it.
        missing, too_old, refused: The reasons of a job's condition.
        instead: What the user can do to go without it.
        cannot: What a refusal means, as a clause.
    """

    name: str
    resource: Resource
    oldest: str
    missing: ConditionReason
    too_old: ConditionReason
    refused: ConditionReason
    instead: str
    cannot: str


class Troubles:
    """Why jobs can't have what they ask of a product."""

    def __init__(self, cluster: Cluster, product: Product) -> None:
        self._cluster = cluster
        self._product = product
        self._known: dict[JobKey, Trouble] = {}

    def of(self, key: JobKey) -> Trouble | None:
        """What the newest write of a job has ended with."""
        return self._known.get(key)

    def forget(self, key: JobKey) -> None:
        self._known.pop(key, None)

    async def note(self, key: JobKey, writing: Awaitable[object]) -> None:
        """Await a write for a job, which may fail for what the job or the cluster lacks."""
        try:
            await writing
        except AlreadyExistsError:
            return
        except (NotFoundError, RefusedError) as error:
            self._known[key] = await self.why(error)
        else:
            self.forget(key)

    async def why(self, error: NotFoundError | RefusedError) -> Trouble:
        """What an answer of the API server means."""
        product = self._product
        if isinstance(error, RefusedError):
            return Trouble(reason=product.refused, message=f"{product.cannot}: {error}")
        versions = await self._served_versions()
        if not versions:
            message = f"{product.name} is not installed in this cluster: install version {product.oldest} or newer"
            return Trouble(reason=product.missing, message=f"{message}, or {product.instead}")
        message = (
            f"this cluster's {product.name} serves {definition_of(product.resource)} in {', '.join(versions)}, and "
            f"spottrain needs {product.resource.version}: install {product.name} {product.oldest} or newer"
        )
        return Trouble(reason=product.too_old, message=f"{message}, or {product.instead}")

    async def _served_versions(self) -> list[str]:
        """The versions in which the cluster serves the resource. Empty: it isn't installed."""
        definition = await self._cluster.get(DEFINITIONS, definition_of(self._product.resource))
        if definition is None:
            return []
        return [each["name"] for each in definition["spec"]["versions"] if each["served"]]
