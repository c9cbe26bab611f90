"""What there is of the NodePools that a job's pools ask for, and why there can't be any."""

from __future__ import annotations

from spottrain_api.contract.conditions import ConditionReason
from spottrain_api.contract.names import LABEL_CONTENT, LABEL_JOB, LABEL_JOB_UID, LABEL_NAMESPACE
from spottrain_operator.core.model import JobView
from spottrain_operator.core.node_pools import DeleteNodePool, NodePoolAction, NodePoolsView, WriteNodePool
from spottrain_operator.core.trouble import Trouble
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import NotFoundError, RefusedError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import NODE_POOLS, Manifest
from spottrain_operator.objects.installed import Product, Troubles
from spottrain_operator.objects.node_pools import node_pool_view, node_pools, trimmed_node_pool
from spottrain_operator.objects.placement import DEFAULT_SITE, Site

KARPENTER = Product(
    name="Karpenter",
    resource=NODE_POOLS,
    oldest="1.0",
    missing=ConditionReason.KARPENTER_MISSING,
    too_old=ConditionReason.KARPENTER_TOO_OLD,
    refused=ConditionReason.NODE_POOL_REFUSED,
    instead="remove nodeClass from capacity.pools to use nodes that others provide",
    cannot="a NodePool can't be made",
)
_OFF = Trouble(
    reason=ConditionReason.KARPENTER_OFF,
    message="a pool names a nodeClass, and the operator doesn't make NodePools: set the chart's value "
    f"karpenter.enabled, or {KARPENTER.instead}",
)


class NodePoolKeeper:
    """Observes the NodePools of jobs, and does what the core decides about them.

    They are in no namespace, so no job can own them for Kubernetes' garbage collector. Their labels name their job,
    and the operator deletes those of a job that is gone.

    Args:
        cluster: Reads and writes.
        site: What the administrator says, for all jobs: also whether the operator may make NodePools.
    """

    def __init__(self, cluster: Cluster, site: Site = DEFAULT_SITE) -> None:
        self._cluster = cluster
        self._site = site
        self._troubles = Troubles(cluster, KARPENTER)

    async def observe(self, job: JobView) -> NodePoolsView | None:
        """The job's NodePools; None if it asks for none, and has left none."""
        wanted = node_pools(job)
        if not self._site.uses_karpenter:
            return NodePoolsView(trouble=_OFF) if wanted else None
        try:
            found = await self._found(JobKey.of_view(job))
        except (NotFoundError, RefusedError) as error:
            return NodePoolsView(trouble=await self._troubles.why(error)) if wanted else None
        own = [each for each in found if each["metadata"]["labels"].get(LABEL_JOB_UID) == job.uid]
        for each in found:
            if each not in own:  # of an earlier job of this name
                await self._delete(each["metadata"]["name"], each["metadata"]["uid"])
        if not (own or wanted):
            return None
        return NodePoolsView(
            wanted={name: each["metadata"]["labels"][LABEL_CONTENT] for name, each in wanted.items()},
            found=tuple(node_pool_view(each) for each in own if "deletionTimestamp" not in each["metadata"]),
            trouble=self._troubles.of(JobKey.of_view(job)) if wanted else None,
        )

    async def act(self, job: JobView, action: NodePoolAction) -> None:
        """Do one action. A second time, it changes nothing.

        A NodePool that is refused doesn't fail the pass: the job says why, and the next pass tries again.
        """
        match action:
            case WriteNodePool():
                await self._troubles.note(JobKey.of_view(job), self._write(job, action.name))
            case DeleteNodePool():
                await self._delete(action.name, action.uid)

    async def delete_all(self, key: JobKey) -> None:
        """Delete the NodePools of a job that is gone."""
        self._troubles.forget(key)
        if not self._site.uses_karpenter:
            return
        try:
            found = await self._found(key)
        except (NotFoundError, RefusedError):
            return  # there are none, or this operator may not see any
        for each in found:
            await self._delete(each["metadata"]["name"], each["metadata"]["uid"])

    async def _found(self, key: JobKey) -> list[Manifest]:
        labels = {LABEL_NAMESPACE: key.namespace, LABEL_JOB: key.name}
        return list((await self._cluster.list(NODE_POOLS, labels=labels, keep=trimmed_node_pool)).items)

    async def _write(self, job: JobView, name: str) -> None:
        new, old = node_pools(job)[name], await self._cluster.get(NODE_POOLS, name)
        if old is None:
            await self._cluster.create(NODE_POOLS, new)
            return
        labels = old["metadata"].get("labels", {}) | new["metadata"]["labels"]
        written = old | {"metadata": old["metadata"] | {"labels": labels}, "spec": new["spec"]}
        await self._cluster.replace(NODE_POOLS, written)

    async def _delete(self, name: str, uid: str) -> None:
        await self._cluster.delete(NODE_POOLS, name, uid=uid)
