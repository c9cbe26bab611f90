"""Pods that Kubernetes refuses are retried and reported.

The ranks continue to train meanwhile.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

from operator_world import KEY, CrashingCluster, World, job
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import LABEL_CAPACITY_TYPE, TAINT_PREEMPTION
from spottrain_api.v1alpha1.pod_template import Network
from spottrain_operator.job_record import JobRecord
from spottrain_operator.kube import resources
from spottrain_operator.kube.errors import ClusterError, ForbiddenError, InvalidObjectError
from spottrain_operator.kube.resources import EVENTS, HISTORIES, NETWORK_POLICIES, PODS, Manifest
from world.faults import WRITES, Fault, Request

WEBHOOK = InvalidObjectError('admission webhook "policy.example.com" denied the request: no team label')
NO_ACCOUNT = ForbiddenError('serviceaccount "trainer" not found')
LARGER_THAN_QUOTA = ForbiddenError("exceeded quota: team, requested: pods=9, used: pods=3, limited: pods=8")


LARGER: dict[str, Any] = {"nodes": {"min": 2, "max": 4}, "capacity": {"onDemand": {"min": 1}, "spot": {"max": 3}}}


GOING = ForbiddenError("unable to create new content in namespace team because it is being terminated")


def type_of(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"][LABEL_CAPACITY_TYPE])


class RefusingCluster(CrashingCluster):
    """Refuses pods while `error` is set.

    `only` limits it to those of one capacity type.
    """

    error: ClusterError | None = None
    only: CapacityType | None = None
    num_refused = 0
    may_annotate = True
    num_annotations = 0

    def __init__(self) -> None:
        super().__init__()
        self.before.append(self._refuses)

    async def _refuses(self, request: Request) -> None:
        match request:
            case "create", resources.PODS, _, dict(pod):
                if self.error is not None and self.only in (None, type_of(pod)):
                    self.num_refused += 1
                    raise self.error
            case "patch", resources.PODS, _, _:
                self.num_annotations += 1
                if not self.may_annotate:
                    raise ForbiddenError('User "operator" cannot patch resource "pods"')


def condition(world: World, kind: str) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {each["type"]: each for each in world.status["conditions"]}
    return found.get(kind, {})


async def training(cluster: RefusingCluster, last_step: int = 10) -> World:
    cluster.put_job(job())
    world = World(cluster, last_step=last_step)
    while world.status.get("phase") != "Running":
        await world.turn()
    return world


@pytest.mark.parametrize("error", [WEBHOOK, NO_ACCOUNT], ids=["invalid", "forbidden"])
async def test_pods_that_are_refused_fail_a_job_that_never_ran_with_the_reason(error: ClusterError) -> None:
    cluster = RefusingCluster()
    cluster.error = error
    cluster.put_job(job())
    world = World(cluster)
    for _ in range(5):
        await world.turn()
    assert world.status["phase"] == "Pending", "what is missing may be on its way"
    assert str(error) in world.status["message"]
    assert condition(world, "PodsHealthy")["reason"] == "PodsRefused"
    await world.until_finished()
    assert world.status["phase"] == "Failed"
    assert condition(world, "Failed")["reason"] == "CannotStart"
    assert str(error) in world.status["message"]
    assert [event["reason"] for event in cluster.events].count("PodNotCreated") == 1


async def test_a_job_created_anew_between_two_passes_inherits_no_refusal() -> None:
    """As with kubectl delete, a repair, and kubectl apply."""
    cluster = RefusingCluster()
    cluster.error = NO_ACCOUNT
    cluster.put_job(job())
    world = World(cluster)
    await world.until_finished()
    assert world.status["phase"] == "Failed"
    del cluster.jobs[KEY]
    cluster.error = None
    cluster.put_job(job())
    assert cluster.jobs[KEY]["metadata"]["generation"] == 1, "as the one before had"
    await world.until_finished()
    assert (world.status["phase"], world.status["failures"]) == ("Succeeded", 0)


def num_records() -> int:
    gc.collect()
    return sum(type(each) is JobRecord for each in gc.get_objects())


async def test_nothing_is_kept_of_a_job_that_is_gone() -> None:
    before, cluster = num_records(), RefusingCluster()
    world = await training(cluster)
    assert num_records() - before == 1
    del cluster.jobs[KEY]
    await world.turn()
    assert num_records() == before


async def test_a_job_whose_pools_have_no_place_says_so() -> None:
    cluster = RefusingCluster()
    pool = {"name": "a", "capacityType": "spot", "provider": "eks"}
    cluster.put_job(job(capacity={"pools": [pool], "onDemand": {"min": 1}}))
    world = World(cluster)
    for _ in range(2):
        await world.turn()
    assert (
        "spec.capacity.pools has no pool for on-demand nodes; add one, or set capacity.onDemand.min to 0"
        in condition(world, "PodsHealthy")["message"]
    )


@pytest.mark.parametrize("error", [WEBHOOK, NO_ACCOUNT], ids=["invalid", "forbidden"])
async def test_one_refused_pod_disturbs_nobody_who_trains(error: ClusterError) -> None:
    cluster = RefusingCluster()
    world = await training(cluster)
    cluster.error = error
    cluster.put_job(job(**LARGER))
    for _ in range(2):
        await world.turn()
    assert world.num_crashes == 0, "the pass goes on to its end"
    assert condition(world, "PodsHealthy")["status"] == "False"
    assert str(error) in condition(world, "PodsHealthy")["message"]
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"
    assert world.status["generation"]["number"] == 1


async def test_a_refused_pod_is_tried_ever_more_seldom_until_it_is_taken() -> None:
    cluster = RefusingCluster()
    world = await training(cluster, last_step=1000)
    cluster.error = WEBHOOK
    cluster.put_job(job(**LARGER))
    for _ in range(64):
        await world.turn()
    assert 4 <= cluster.num_refused <= 8
    cluster.error = None
    for _ in range(31):
        await world.turn()
    assert len(cluster.pods) == 4
    assert condition(world, "PodsHealthy")["status"] == "True"


async def lose_all(world: World) -> None:
    world.cluster.pods.clear()
    world.cluster.nodes.clear()
    await world.turn()


@pytest.mark.parametrize("lost", list(CapacityType))
async def test_lost_pods_are_replaced_at_once_while_those_of_the_other_type_are_refused(lost: CapacityType) -> None:
    cluster = RefusingCluster()
    world = await training(cluster, last_step=1000)
    [cluster.only] = set(CapacityType) - {lost}
    cluster.error = WEBHOOK
    await lose_all(world)
    await lose_all(world)
    replaced = [type_of(pod) for pod in cluster.pods.values()]
    assert replaced == [lost.value] * (2 if lost is CapacityType.SPOT else 1)
    assert str(WEBHOOK) in condition(world, "PodsHealthy")["message"]
    cluster.error = None
    for _ in range(31):
        await world.turn()
    assert len(cluster.pods) == 3
    assert condition(world, "PodsHealthy")["status"] == "True"


async def test_pods_of_a_type_that_is_refused_are_tried_one_at_a_time() -> None:
    cluster = RefusingCluster()
    world = await training(cluster, last_step=1000)
    cluster.error = WEBHOOK
    await lose_all(world)
    assert cluster.num_refused == 3, "nothing was known of either type"
    cluster.only = CapacityType.ON_DEMAND
    for _ in range(31):
        await lose_all(world)
    assert cluster.num_refused <= 3 + 5
    assert len(cluster.pods) == 2


@pytest.mark.parametrize("error", [WEBHOOK, LARGER_THAN_QUOTA], ids=["by a webhook", "by a quota"])
async def test_an_edit_that_is_refused_takes_no_pod_away(error: ClusterError) -> None:
    cluster = RefusingCluster()
    world = await training(cluster, last_step=1000)
    cluster.error = error
    cluster.put_job(job(image="local/other"))
    for _ in range(40):
        await world.turn()
    assert (len(cluster.pods), cluster.deleted) == (3, set())
    assert (world.status["phase"], world.status["generation"]["state"]) == ("Running", "Active")
    assert str(error) in condition(world, "PodsHealthy")["message"]
    cluster.error = None
    for _ in range(32):
        await world.turn()
    assert [each["reason"] for each in world.status["transitions"]] == ["Edited"]
    assert {pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()} >= {"local/other"}


async def test_members_pods_are_annotated_once() -> None:
    cluster = RefusingCluster()
    world = await training(cluster)
    for _ in range(3):
        await world.turn()
    assert cluster.num_annotations == 3
    found = [pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] for pod in cluster.pods.values()]
    assert found == ["true"] * 3


async def test_an_operator_without_the_right_to_annotate_says_so_once_and_trains_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = RefusingCluster()
    cluster.may_annotate = False
    world = await training(cluster)
    await world.until_finished()
    assert (world.status["phase"], world.num_crashes) == ("Succeeded", 0)
    [said] = [record.getMessage() for record in caplog.records if "can't be annotated" in record.getMessage()]
    assert "give it the verb patch on pods, as" in said


async def test_annotations_that_are_refused_are_tried_ever_more_seldom_until_they_are_taken() -> None:
    """As while a webhook of the cluster does not answer."""
    cluster = RefusingCluster()
    cluster.may_annotate = False
    world = await training(cluster, last_step=1000)
    for _ in range(64):
        await world.turn()
    assert 4 * 3 <= cluster.num_annotations <= 8 * 3
    cluster.may_annotate = True
    for _ in range(64):
        await world.turn()
    found = [pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] for pod in cluster.pods.values()]
    assert found == ["true"] * 3


async def test_a_pod_with_a_notice_loses_its_protection_at_once_though_another_is_refused_one() -> None:
    """Otherwise the drain of its node waits for it."""
    cluster = RefusingCluster()
    finance = ForbiddenError("pods of finance are not annotated")
    cluster.before.append(Fault(error=finance, verbs=("patch",), resource=PODS, name="gpt-1"))
    world = await training(cluster, last_step=1000)
    for _ in range(10):
        await world.turn()
    leaving = cluster.pods[KEY.namespace, "gpt-2"]
    assert leaving["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    cluster.nodes[leaving["spec"]["nodeName"]]["spec"] = {
        "taints": [{"key": TAINT_PREEMPTION, "effect": "NoSchedule"}]
    }
    await world.reconciler.reconcile(KEY)
    assert "karpenter.sh/do-not-disrupt" not in leaving["metadata"]["annotations"]


class QuotaCluster(RefusingCluster):
    """A namespace with a quota of pods; None: without."""

    most: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.before.insert(0, self._limits)

    async def _limits(self, _: Request) -> None:
        used = len(self.pods)
        full = self.most is not None and used >= self.most
        said = f"exceeded quota: team, requested: pods=1, used: pods={used}, limited: pods={self.most}"
        self.error = ForbiddenError(said) if full else None


NO_PODS = (
    "exceeded quota: team, requested: pods=1, used: pods=0, limited: pods=0. Raise the quota, or lower nodes.min"
)


async def test_a_new_job_waits_for_a_quota_of_zero_to_be_raised() -> None:
    cluster = QuotaCluster()
    cluster.most = 0
    cluster.put_job(job(nodes={"min": 3, "max": 3}))
    world = World(cluster)
    for _ in range(64):
        await world.turn()
    assert (world.status["phase"], world.num_crashes) == ("Pending", 0), "somebody may raise it"
    assert NO_PODS in world.status["message"]
    assert 4 <= cluster.num_refused <= 16
    cluster.most = 10
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"


async def test_a_job_that_trains_survives_a_quota_of_zero() -> None:
    cluster = QuotaCluster()
    world = await training(cluster, last_step=1000)
    cluster.most = 0
    for _ in range(10):
        await world.turn()
    assert (world.status["phase"], cluster.num_refused) == ("Running", 0), "quotas take no pods"
    del cluster.pods[KEY.namespace, "gpt-3"]
    for _ in range(8):
        await world.turn()
    assert sorted(name for _, name in cluster.pods) == ["gpt-1", "gpt-2"]
    assert "used: pods=2, limited: pods=0. Raise the quota" in condition(world, "PodsHealthy")["message"]
    cluster.pods.clear()
    for _ in range(64):
        await world.turn()
    assert (world.status["phase"], world.num_crashes) == ("Recovering", 0)
    assert NO_PODS in world.status["message"]
    assert 4 <= cluster.num_refused <= 16
    cluster.most = 10
    for _ in range(32):
        await world.turn()
    assert (len(cluster.pods), world.status["generation"]["number"]) == (3, 3)


async def test_a_namespace_that_is_being_deleted_crashes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cluster = RefusingCluster()
    world = await training(cluster, last_step=1000)
    cluster.error = GOING
    for new in (EVENTS, HISTORIES, NETWORK_POLICIES):
        cluster.before.append(Fault(error=GOING, verbs=WRITES, resource=new))
    world.isolates_jobs = True
    world.start_operator()
    cluster.pods.clear()  # they go first, and the job is still there
    for _ in range(64):
        await world.turn()
    assert world.num_crashes == 0
    assert (world.status["phase"], cluster.pods) == ("Recovering", {})
    assert str(GOING) in world.status["message"]
    assert 4 <= cluster.num_refused <= 16
    said = [record.getMessage() for record in caplog.records if "is in this log alone" in record.getMessage()]
    assert len(said) < 12
    assert f"gpt: the event PodNotCreated is in this log alone: {GOING}" in said
    del cluster.jobs[KEY]
    for _ in range(3):
        await world.turn()
    assert world.num_crashes == 0


EFA: dict[str, Any] = {"podTemplate": {"network": "efa"}, "resources": {"limits": {"vpc.amazonaws.com/efa": "4"}}}


async def test_a_job_waits_for_a_network_that_its_administrator_does_not_allow() -> None:
    cluster = RefusingCluster()
    cluster.put_job(job(**EFA))
    world = World(cluster)
    for _ in range(60):
        await world.turn()
    assert cluster.pods == {}, "no pod runs without the network that the job asks for, or with rights it may not have"
    assert world.status["phase"] == "Pending", "an administrator may allow it yet"
    healthy = condition(world, "PodsHealthy")
    assert (healthy["status"], healthy["reason"]) == ("False", "PodsRefused")
    sentence = "spec.podTemplate.network: the cluster's administrator does not allow efa"
    assert healthy["message"].startswith(sentence)
    assert "jobs.allowedNetworks" in healthy["message"]
    assert sentence in world.status["message"]
    world.allowed_networks = frozenset({Network.EFA})
    world.start_operator()
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"


async def test_an_edit_to_a_network_that_is_not_allowed_leaves_the_ranks_alone() -> None:
    cluster = RefusingCluster()
    world = await training(cluster)
    cluster.put_job(job(**EFA))
    for _ in range(2):
        await world.turn()
    assert condition(world, "PodsHealthy")["reason"] == "PodsRefused"
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"
    assert world.status["generation"]["number"] == 1
