"""Does what the core decided: one exhaustive match over its actions."""

from __future__ import annotations

from typing import assert_never

from spottrain_operator.core.model import AnnotatePod, CreatePod, DeleteJob, DeletePod, JobAction, JobView
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import AlreadyExistsError, NoPoolError, NotAllowedError
from spottrain_operator.kube.resources import JOBS, PODS
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.placement import DEFAULT_SITE, Site
from spottrain_operator.objects.pods import JobRef, annotate_pod, build_pod


async def apply(
    cluster: Cluster,
    job: JobView,
    action: JobAction,
    *,
    control: ControlAddress,
    site: Site = DEFAULT_SITE,
    group: str = "",
) -> None:
    """Do one action. Every action is idempotent: a second time, it changes nothing.

    New pods join the PodGroup `group`, if any.

    Raises:
        ClusterError: It failed, but may succeed later.
        RefusedError: It can succeed only after something else has changed.
    """
    match action:
        case CreatePod():
            _check_network(job, site)
            await _create_pod(cluster, job, action, control, site, group)
        case DeletePod():
            await cluster.delete(
                PODS, action.name, namespace=job.namespace, uid=action.uid, grace_seconds=action.grace_seconds
            )
        case AnnotatePod():
            await annotate_pod(cluster, job.namespace, action.name, uid=action.uid, annotations=action.annotations)
        case DeleteJob():
            await cluster.delete(JOBS, job.name, namespace=job.namespace, uid=action.uid)
        case _:
            assert_never(action)


def _check_network(job: JobView, site: Site) -> None:
    network = job.spec.pod_template.network
    if network is not None and network not in site.allowed_networks:
        raise NotAllowedError(
            f"spec.podTemplate.network: the cluster's administrator does not allow {network.value}, which lets pods "
            "run as root and lock memory: remove the field, or ask for it to be added to the value "
            "jobs.allowedNetworks of spottrain's chart"
        )


async def _create_pod(
    cluster: Cluster, job: JobView, action: CreatePod, control: ControlAddress, site: Site, group: str
) -> None:
    try:
        pod = build_pod(
            JobRef(namespace=job.namespace, name=job.name, uid=job.uid),
            job.spec,
            name=action.name,
            sequence=action.sequence,
            capacity_type=action.capacity_type,
            pool=action.pool,
            avoided=action.avoided,
            group=group,
            control=control,
            site=site,
        )
        await cluster.create(PODS, pod)
    except AlreadyExistsError:
        return
    except ValueError as error:
        raise NoPoolError(f"spec.{error}") from error
