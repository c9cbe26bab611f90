"""No value of a script makes a report be refused.

If one is refused all the same, its job and the operator's log say so.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from control_api_setup import AUTHORIZED, JOB, NOW, POD, Setup, report, running, served
from operator_world import KEY, CrashingCluster, World, job
from scene import Scene, training, training_job
from spottrain_api.contract.assignments import AgentReport, RelayReport
from spottrain_api.contract.message import MAX_INTEGER
from spottrain_api.contract.reports import Failure, FailureReason, MemoryEstimate, Progress, StrategyChoice
from spottrain_api.history import HistoryPoint
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.control_api.server import REFUSALS_BURST
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.kube.identities import PodIdentity
from spottrain_operator.objects.history import history_point

LARGEST = 1.7976931348623157e308
MEASURED = ("loss", "tokens_per_second")
BAD = '{"pod": "gpt-1"}'
PROBLEM = "not an agent report: podUid: Field required"


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    """The operator has decided that the pod leads a generation."""
    async with served() as setup:
        setup.board.publish(JOB, {POD.uid: running(1, 0)})
        yield setup


def of_a_script(measured: float, asked: float) -> bytes:
    """A report that is passed on, with everything that a script's values become."""
    memory = dict.fromkeys(MemoryEstimate.model_fields, 1)
    strategy = StrategyChoice(strategy="ddp", name="ddp", reason="It fits.", memory=MemoryEstimate(**memory))
    progress = Progress(generation=1, total_steps=1, updated_at=NOW, strategy=strategy)
    said = json.loads(AgentReport(**dict(report(progress=progress))).to_json())
    said["progress"] |= {
        "totalSteps": asked,
        "loss": measured,
        "tokensPerSecond": measured,
    }
    said["progress"]["strategy"]["memory"] = dict.fromkeys(memory, asked)
    return json.dumps(said | {"peers": [said | {"pod": "gpt-2", "podUid": "uid-2"}]}).encode()


@pytest.mark.parametrize("measured", [1e300, -1e300, 2.0**63, LARGEST, -LARGEST])
@pytest.mark.parametrize("asked", [2**70, -(2**70), 1e300])
async def test_any_number_of_a_script_is_taken(setup: Setup, measured: float, asked: float) -> None:
    body = of_a_script(measured, asked)
    answer = await setup.client.post("/v1/report", data=body, headers=AUTHORIZED)
    assert (answer.status, await answer.text()) == (204, "")
    [view] = setup.reports.of(frozenset({POD.uid})).values()
    progress = view.report.progress
    assert progress is not None
    assert {getattr(progress, name) for name in MEASURED} == {measured}
    bound = MAX_INTEGER if asked > 0 else 0
    assert progress.strategy is not None
    assert {progress.total_steps, *vars(progress.strategy.memory).values()} == {bound}
    is_stored(training_job().all_say(progress=training().model_copy(update=dict(progress) | {"phase": "training"})))


def is_stored(scene: Scene) -> None:
    """Its status and its point of the history are written and read as JSON and CSV."""
    [reported] = {view.report.progress.loss for view in scene.observed.reports.values() if view.report.progress}
    status = scene.later(60).plan().status
    loss = status.progress.loss
    assert loss is not None
    assert loss == pytest.approx(reported, rel=1e-3)
    assert abs(loss) >= 9.22e18
    text = json.dumps(status.model_dump(mode="json", by_alias=True, exclude_none=True), allow_nan=False)
    assert TrainingJobStatus.model_validate(json.loads(text)) == status
    point = history_point(status, NOW)
    assert HistoryPoint.from_row(point.to_row().split(",")).loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("text", ["\udcff", "x" * 10**6, "\x00" * 5000, "損" * 5000])
async def test_any_text_of_a_script_is_taken(setup: Setup, text: str) -> None:
    failure = Failure(reason=FailureReason.SCRIPT_ERROR, message=text, traceback=text)
    progress = Progress(generation=1, updated_at=NOW, message=text, checkpoint_failure=failure)
    own = AgentReport(**dict(report(progress=progress, failure=failure)))
    body = RelayReport(**dict(own), peers=(own.model_copy(update={"pod_uid": "uid-2"}),)).to_json()
    assert (await setup.client.post("/v1/report", data=body, headers=AUTHORIZED)).status == 204


async def test_a_refused_report_is_noted_until_the_next_good_one(setup: Setup) -> None:
    uids = frozenset({POD.uid, "uid-2"})
    for _ in range(3):
        assert (await setup.client.post("/v1/report", data=BAD, headers=AUTHORIZED)).status == 400
    assert setup.reports.refused(uids) == {POD.uid: PROBLEM}
    assert setup.woken == [(JOB, False)], "once"
    good = report().to_json()
    for _ in range(2):
        assert (await setup.client.post("/v1/report", data=good, headers=AUTHORIZED)).status == 204
    assert setup.reports.refused(uids) == {}
    assert (await setup.client.post("/v1/report", data=b" " * 2**20, headers=AUTHORIZED)).status == 413
    assert "larger than 384 KiB" in setup.reports.refused(uids)[POD.uid]
    setup.woken.clear()
    assert (await setup.client.post("/v1/report", data=good, headers=AUTHORIZED)).status == 204
    assert setup.woken == [(JOB, False)], "no news, but the job's message has to change"


async def test_a_pod_that_is_gone_is_forgotten(setup: Setup) -> None:
    setup.reports.refuse(POD, PROBLEM)
    setup.reports.keep(JOB, frozenset())
    assert setup.reports.refused(frozenset({POD.uid})) == {}
    setup.reports.refuse(POD, PROBLEM)
    assert setup.reports.refused(frozenset({POD.uid})) == {}


async def test_the_log_names_pod_and_problem_and_is_not_filled(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2 * REFUSALS_BURST):
        await setup.client.post("/v1/report", data=BAD, headers=AUTHORIZED)
    said = [record for record in caplog.records if "is refused" in record.getMessage()]
    assert REFUSALS_BURST <= len(said) <= REFUSALS_BURST + 1
    assert said[0].levelname == "WARNING"
    assert said[0].getMessage() == f"the report of pod team/gpt-1 is refused: {PROBLEM}"


def refuses(scene: Scene, *sequences: int) -> Scene:
    refused = {f"u{sequence}": PROBLEM for sequence in sequences}
    return replace(scene, observed=replace(scene.observed, refused_reports=refused))


def test_the_jobs_message_says_whose_reports_are_refused_and_why() -> None:
    status = refuses(training_job(), 2, 3).plan().status
    assert status.message.startswith(
        f"Training in generation 1 with 4 nodes. The operator refuses what job-2, job-3 report ({PROBLEM}). "
    )
    assert "hangTimeoutSeconds" in status.message
    assert "report it with the operator's log" in status.message
    progressing = status.condition("Progressing")
    assert progressing is not None
    assert progressing.message == status.message
    assert "refuses" not in training_job().plan().status.message


def with_polls(scene: Scene, seconds: float) -> Scene:
    """Time passes, in which no report is taken and all agents hold their polls."""
    later = scene.later(seconds)
    views = {
        uid: replace(view, heard_at=later.now) for uid, view in scene.observed.reports.items()
    }  # received_at as before
    return replace(later, observed=replace(later.observed, reports=views))


def test_the_hang_limit_counts_from_the_last_report_that_was_taken() -> None:
    scene = with_polls(training_job(), DEFAULT_TIMING.no_step + 1)
    assert "no step since" not in scene.plan().status.message, "at rest, no report means that steps come"
    assert "no step since" not in refuses(scene, 1, 2, 3).plan().status.message, "one is taken"
    refused = refuses(scene, 1, 2, 3, 4)
    assert "; no step since" in refused.plan().status.message
    over = refuses(with_polls(training_job(), 601), 1, 2, 3, 4).plan().status.generation
    assert over is not None
    assert over.reason == "Hang"


async def test_a_pass_over_the_job_heeds_it() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster, last_step=50)
    for _ in range(5):
        await world.turn()
    [pod, *_] = cluster.pods.values()
    meta: dict[str, Any] = pod["metadata"]
    world.reports.refuse(PodIdentity(namespace=KEY.namespace, pod=meta["name"], uid=meta["uid"]), PROBLEM)
    await world.turn()
    assert f"The operator refuses what {meta['name']} reports ({PROBLEM})" in world.status["message"]
    await world.turn()
    assert "refuses" not in world.status["message"]
