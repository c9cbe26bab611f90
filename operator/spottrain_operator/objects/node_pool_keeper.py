"""What there is of the NodePools that a job's pools ask for, and why there can't be any."""

from __future__ import annotations

from spottrain_api.contract.conditions import ConditionReason
from spottrain_api.contract.names import LABEL_CONTENT, LABEL_JOB, LABEL_JOB_UID, LABEL_NAMESPACE
from spottrain_operator.core.model import JobView
from spottrain_operator.core.node_pools import DeleteNodePool, NodePoolAction, NodePoolsView, WriteNodePool
from spottrain_operator.core.trouble import Trouble
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import AlreadyExistsError, NotFoundError, RefusedError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import NODE_POOLS, Manifest
from spottrain_operator.objects.installed import definition_of, served_versions
from spottrain_operator.objects.node_pools import node_pool_view, node_pools, trimmed_node_pool
from spottrain_operator.objects.placement import DEFAULT_SITE, Site

OLDEST_KARPENTER = "1.0"
_WITHOUT = "remove nodeClass from capacity.pools to use nodes that others provide"


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
        self._refusals: dict[JobKey, Trouble] = {}

    async def observe(self, job: JobView) -> NodePoolsView | None:
        """The job's NodePools; None if it asks for none, and has left none."""
        wanted = node_pools(job)
        if not self._site.uses_karpenter:
            return NodePoolsView(trouble=_OFF) if wanted else None
        try:
            found = await self._found(JobKey.of_view(job))
        except NotFoundError:
            return NodePoolsView(trouble=await self._missing()) if wanted else None
        except RefusedError as error:
            return NodePoolsView(trouble=_refused(error)) if wanted else None
        own = [each for each in found if each["metadata"]["labels"].get(LABEL_JOB_UID) == job.uid]
        for each in found:
            if each not in own:  # of an earlier job of this name
                await self._delete(each["metadata"]["name"], each["metadata"]["uid"])
        if not (own or wanted):
            return None
        return NodePoolsView(
            wanted={name: each["metadata"]["labels"][LABEL_CONTENT] for name, each in wanted.items()},
            found=tuple(node_pool_view(each) for each in own if "deletionTimestamp" not in each["metadata"]),
            trouble=self._refusals.get(JobKey.of_view(job)) if wanted else None,
        )

    async def act(self, job: JobView, action: NodePoolAction) -> None:
        """Do one action. A second time, it changes nothing.

        A NodePool that is refused doesn't fail the pass: the job says why, and the next pass tries again.
        """
        match action:
            case WriteNodePool():
                await self._write(job, action.name)
            case DeleteNodePool():
                await self._delete(action.name, action.uid)

    async def delete_all(self, key: JobKey) -> None:
        """Delete the NodePools of a job that is gone."""
        self._refusals.pop(key, None)
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
        key, new = JobKey.of_view(job), node_pools(job)[name]
        try:
            old = await self._cluster.get(NODE_POOLS, name)
            if old is None:
                await self._cluster.create(NODE_POOLS, new)
            else:
                labels = old["metadata"].get("labels", {}) | new["metadata"]["labels"]
                written = old | {"metadata": old["metadata"] | {"labels": labels}, "spec": new["spec"]}
                await self._cluster.replace(NODE_POOLS, written)
        except AlreadyExistsError:
            return
        except NotFoundError:
            self._refusals[key] = await self._missing()
        except RefusedError as error:
            self._refusals[key] = _refused(error)
        else:
            self._refusals.pop(key, None)

    async def _delete(self, name: str, uid: str) -> None:
        await self._cluster.delete(NODE_POOLS, name, uid=uid)

    async def _missing(self) -> Trouble:
        """Why there is no such resource."""
        versions = await served_versions(self._cluster, NODE_POOLS)
        if not versions:
            return Trouble(
                reason=ConditionReason.KARPENTER_MISSING,
                message=f"Karpenter is not installed in this cluster: install version {OLDEST_KARPENTER} or newer, "
                f"or {_WITHOUT}",
            )
        return Trouble(
            reason=ConditionReason.KARPENTER_TOO_OLD,
            message=f"this cluster's Karpenter serves {definition_of(NODE_POOLS)} in {', '.join(versions)}, and "
            f"spottrain needs {NODE_POOLS.version}: install Karpenter {OLDEST_KARPENTER} or newer, or {_WITHOUT}",
        )


_OFF = Trouble(
    reason=ConditionReason.KARPENTER_OFF,
    message="a pool names a nodeClass, and the operator doesn't make NodePools: set the chart's value "
    f"karpenter.enabled, or {_WITHOUT}",
)


def _refused(error: RefusedError) -> Trouble:
    return Trouble(reason=ConditionReason.NODE_POOL_REFUSED, message=f"a NodePool can't be made: {error}")
