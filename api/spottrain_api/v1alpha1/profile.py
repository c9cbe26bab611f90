"""The TrainingProfile: what an administrator gives to jobs, once for all, and which limits they have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.settings.resource import Line, Resource
from spottrain_api.v1alpha1.capacity import MAX_MEMBERS, POOL_RULES, Capacity, Nodes, Pool
from spottrain_api.v1alpha1.pod_template import Toleration
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_runtime.wording import listed

PROFILE_KIND = "TrainingProfile"
PROFILE_PLURAL = "trainingprofiles"
# Jobs that name no profile take this one, if it exists.
DEFAULT_PROFILE = "default"

_PRICE = "Price of one {} node per hour, in capacity.currency. Default: that of the first pool of its type with one."


class OnDemandPrice(Resource):
    """What on-demand nodes cost."""

    price_per_hour: Annotated[
        float | None, Field(ge=0, allow_inf_nan=False, description=_PRICE.format("on-demand"))
    ] = None


class SpotPrice(Resource):
    """What spot nodes cost."""

    price_per_hour: Annotated[float | None, Field(ge=0, allow_inf_nan=False, description=_PRICE.format("spot"))] = (
        None
    )


class ProfileCapacity(Resource):
    """Pools for jobs that have none, and prices for jobs that give none."""

    cel_rules = POOL_RULES

    on_demand: OnDemandPrice = OnDemandPrice()
    spot: SpotPrice = SpotPrice()
    pools: Annotated[
        tuple[Pool, ...],
        Field(max_length=16, description="Node pools of jobs that name none. Default: none."),
    ] = ()
    currency: Annotated[
        str,
        Field(max_length=16, pattern=r"^[A-Z]{3}$", description="Currency of the prices, as its ISO 4217 code."),
    ] = "USD"


class ProfileLimits(Resource):
    """What jobs may not exceed."""

    nodes: Annotated[
        int | None,
        Field(ge=1, le=MAX_MEMBERS, description=f"Most that nodes.max of a job may be. Default: {MAX_MEMBERS}."),
    ] = None
    service_accounts: Annotated[
        tuple[Line, ...],
        Field(
            max_length=32,
            description="Service accounts that jobs may name in podTemplate.serviceAccountName. Jobs that name none "
            "get the first one. Default: any.",
        ),
    ] = ()


class ProfileSpec(Resource):
    """What jobs take from the profile when they are accepted. Later edits of the profile don't change these jobs."""

    image: Annotated[
        Line, Field(max_length=1024, description="Container image of jobs that name none. Default: none.")
    ] = ""
    capacity: ProfileCapacity = ProfileCapacity()
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(max_length=16, description="Taints that the pods of jobs tolerate beside those of the job itself."),
    ] = ()
    limits: ProfileLimits = ProfileLimits()


def with_profile(job: TrainingJobSpec, profile: ProfileSpec) -> TrainingJobSpec:
    """The job with what it takes from a profile. What the job says itself comes first."""
    template = job.pod_template
    accounts = profile.limits.service_accounts
    return job.model_copy(
        update={
            "image": job.image or profile.image,
            "capacity": _with_pools_and_prices(job.capacity, profile.capacity),
            "pod_template": template.model_copy(
                update={
                    "tolerations": (*profile.tolerations, *template.tolerations),
                    "service_account_name": template.service_account_name or (accounts[0] if accounts else None),
                }
            ),
        }
    )


def _with_pools_and_prices(own: Capacity, given: ProfileCapacity) -> Capacity:
    """One price of the job takes the place of all the profile's: they may be in another currency."""
    if _gives_prices(own):
        pools = own.pools or tuple(pool.model_copy(update={"price_per_hour": None}) for pool in given.pools)
        return own.model_copy(update={"pools": pools})
    return own.model_copy(
        update={
            "pools": own.pools or given.pools,
            "currency": given.currency if _gives_prices(given) else own.currency,
            "on_demand": own.on_demand.model_copy(update={"price_per_hour": given.on_demand.price_per_hour}),
            "spot": own.spot.model_copy(update={"price_per_hour": given.spot.price_per_hour}),
        }
    )


def _gives_prices(capacity: Capacity | ProfileCapacity) -> bool:
    parts = (capacity.on_demand, capacity.spot, *capacity.pools)
    return any(part.price_per_hour is not None for part in parts)


def within(job: TrainingJobSpec, limits: ProfileLimits) -> TrainingJobSpec:
    """The job cut back to the limits, as an edit must not end what runs."""
    most, accounts, template = limits.nodes or MAX_MEMBERS, limits.service_accounts, job.pod_template
    nodes = Nodes(min=min(job.nodes.min, most), max=min(job.nodes.max, most))
    if accounts and template.service_account_name not in accounts:
        template = template.model_copy(update={"service_account_name": accounts[0]})
    return job.model_copy(update={"nodes": nodes, "pod_template": template})


def beyond(job: TrainingJobSpec, name: str, profile: ProfileSpec) -> list[str]:
    """What a job with its profile breaks or lacks, as sentences without a full stop."""
    limits, account = profile.limits, job.pod_template.service_account_name
    found = []
    if not job.image:
        found.append(f"image is missing: neither the job nor profile {name} has one; add it to one of them")
    if limits.nodes is not None and job.nodes.max > limits.nodes:
        found.append(f"nodes.max is {job.nodes.max}, and profile {name} allows {limits.nodes}; lower it")
    if limits.service_accounts and account not in limits.service_accounts:
        found.append(
            f"podTemplate.serviceAccountName is {account}, and profile {name} allows "
            f"{listed(limits.service_accounts)}; name one of these, or none"
        )
    if job.budget is not None and (unpriced := _unpriced(job.capacity)):
        found.append(
            f"budget.maxCost bounds nothing without prices, and neither the job nor profile {name} has one of "
            f"{listed(unpriced)} nodes; add it to one of them"
        )
    return found


def _unpriced(capacity: Capacity) -> list[str]:
    """The types of nodes that the job may use, and whose price nobody gives."""
    found = []
    for kind, own in ((CapacityType.ON_DEMAND, capacity.on_demand), (CapacityType.SPOT, capacity.spot)):
        pools = [pool for pool in capacity.pools if pool.kind is kind]
        priced = own.price_per_hour is not None or any(pool.price_per_hour is not None for pool in pools)
        if own.max != 0 and not priced and (pools or not capacity.pools):
            found.append(kind.value)
    return found
