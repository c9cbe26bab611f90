"""How a generation of real ranks ends, and what the agent says of it."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from agent_pods import TRAIN_FOREVER, FakeOperator, Pods, appears, said
from spottrain_api.contract.assignments import AgentPhase, Assignment, AssignmentAction
from spottrain_api.contract.reports import FailureReason, TrainerPhase
from spottrain_api.settings.entrypoint import Entrypoint


async def test_exit_ends_the_pod_with_code_0(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script(TRAIN_FOREVER), ["a"]))
    await appears(pods.folder / "started-0")
    await operator.assign({"a": Assignment(action=AssignmentAction.EXIT)})
    assert await asyncio.to_thread(pods.processes["a"].wait, 10) == 0


async def test_exit_ends_a_pod_whose_ranks_failed_with_code_1(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script("raise ValueError('no such column')"), ["a"]))
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["a"])
    await operator.assign({"a": Assignment(action=AssignmentAction.EXIT)})
    assert await asyncio.to_thread(pods.processes["a"].wait, 10) == 1


async def test_a_missing_entrypoint_is_reported_before_anything_starts(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await operator.wait_for(lambda: "a" in operator.reports)
    await operator.assign(pods.generation(1, Entrypoint(script="/nowhere/train.py"), ["a"]))
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["a"])
    failure = operator.reports["a"].failure
    assert failure is not None
    assert failure.reason is FailureReason.ENTRYPOINT_NOT_FOUND
    assert "/nowhere/train.py" in failure.message


async def test_a_script_that_raises_is_reported_with_its_last_line(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script("raise ValueError('no such column: price')"), ["a"]))
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["a"], seconds=10)
    failure = operator.reports["a"].failure
    assert failure is not None
    assert (failure.reason, failure.exit_code) == (FailureReason.SCRIPT_ERROR, 1)
    assert failure.message == f"ValueError: no such column: price ({pods.folder}/train.py, line 1)"
    assert "line 1, in <module>" in (failure.traceback or "")


async def test_a_worker_killed_by_a_signal_is_reported_as_killed(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await pods.warm()
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    await operator.assign(pods.generation(1, pods.script(script), ["a"], processes_per_node=2))
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["a"], seconds=10)
    failure = operator.reports["a"].failure
    assert failure is not None
    assert (failure.reason, failure.exit_code) == (FailureReason.KILLED, -9)


async def test_a_killed_worker_is_reported_though_its_peer_does_not_end(pods: Pods, operator: FakeOperator) -> None:
    """As inside a collective, where no Python handler of SIGTERM runs."""
    pods.start("a")
    await pods.warm()
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    await operator.assign(pods.generation(1, pods.script(script), ["a"], processes_per_node=2))
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["a"], seconds=20)
    failure = operator.reports["a"].failure
    assert failure is not None
    assert (failure.reason, failure.rank, failure.exit_code) == (FailureReason.KILLED, 1, -9)


@pytest.mark.parametrize(
    ("torchrun_tells", "sentence"),
    [
        (True, "The rank was killed by SIGKILL."),
        (False, "The rank ended without an exception: see in the script"),
    ],
    ids=["torchrun tells", "nobody tells"],
)
async def test_a_killed_worker_is_the_cause_though_its_peer_reports_first(
    torchrun_tells: bool, sentence: str, pods: Pods, operator: FakeOperator
) -> None:
    """The peer's failure makes the operator stop all members.

    Torchrun says only after that how the worker ended.
    """
    names = ["a", "b"]
    pods.start(*names)
    await pods.warm()
    run = pods.generation(1, pods.script(TRAIN_FOREVER), names)
    await operator.assign(run)
    worker = int(await said(pods.folder / "started-0"))
    torchrun = psutil.Process(worker).parent()
    assert torchrun is not None
    torchrun.suspend()
    os.kill(worker, signal.SIGKILL)
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["b"], seconds=10)
    failure = operator.reports["b"].failure
    assert failure is not None
    assert failure.reason is FailureReason.LOST_PEER

    await operator.assign({name: run[name].model_copy(update={"action": AssignmentAction.STOP}) for name in names})
    if torchrun_tells:
        torchrun.resume()
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["a"], seconds=10)
    failure = operator.reports["a"].failure
    assert failure is not None
    assert failure.message.startswith(sentence)


async def test_a_worker_that_leaves_by_os_exit_0_has_succeeded(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script("import os; os._exit(0)"), ["a"]))
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 1, ["a"], seconds=60)


GOES_ON_AFTER_ITS_SESSION = """
    import atexit, pathlib, sys, time, torch, spottrain
    out = pathlib.Path(sys.argv[1])
    atexit.register((out / "at exit").touch)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    with spottrain.session() as session:
        training = session.prepare(
            torch.nn.Linear(3, 1), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), dataset=data
        )
        for step in training.steps(total=2):
            for inputs, targets in step.micro_batches():
                step.backward(torch.nn.functional.mse_loss(training.model(inputs), targets))
            step.update()
    while not (out / "go on").exists():
        time.sleep(0.02)
    (out / "uploaded").touch()
"""


async def test_a_script_has_succeeded_when_it_has_done_what_comes_after_its_session(
    pods: Pods, operator: FakeOperator
) -> None:
    """It may evaluate, or upload the model."""

    def is_done() -> bool:
        progress = operator.reports["a"].progress
        return progress is not None and progress.phase is TrainerPhase.DONE

    pods.start("a")
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script(GOES_ON_AFTER_ITS_SESSION), ["a"]))
    await operator.wait_for(is_done)
    assert operator.reports["a"].phase is AgentPhase.RUNNING
    (pods.folder / "go on").touch()
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 1, ["a"])
    assert (pods.folder / "uploaded").exists()
    assert (pods.folder / "at exit").exists()
    await operator.assign({"a": Assignment(action=AssignmentAction.EXIT)})
    assert await asyncio.to_thread(pods.processes["a"].wait, 10) == 0


LEAVES_WORK_TO_ITS_EXIT = """
    import multiprocessing, pathlib, sys, time, weakref
    out = pathlib.Path(sys.argv[1])

    def upload():
        time.sleep(1)
        (out / "uploaded").touch()

    class Model: ...

    model = Model()
    weakref.finalize(model, (out / "finalized").touch)
    multiprocessing.Process(target=upload).start()
"""


async def test_a_script_has_succeeded_when_its_processes_and_finalizers_have(
    pods: Pods, operator: FakeOperator
) -> None:
    """As under `python`, whose modules see to that at its exit."""
    pods.start("a")
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script(LEAVES_WORK_TO_ITS_EXIT), ["a"]))
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 1, ["a"])
    assert (pods.folder / "uploaded").exists()
    assert (pods.folder / "finalized").exists()


KILLED_WHILE_TORCHRUN_IS_SLOW = """
import os, signal, time
launcher, worker = os.getppid(), os.getpid()
if os.fork():
    time.sleep(600)
os.setsid()
os.kill(launcher, signal.SIGSTOP)
os.kill(worker, signal.SIGKILL)
time.sleep(2)
os.kill(launcher, signal.SIGCONT)
os._exit(0)
"""


async def test_a_killed_worker_has_not_succeeded_though_torchrun_says_so_late(
    pods: Pods, operator: FakeOperator
) -> None:
    """As on a busy machine."""
    pods.start("a")
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script(KILLED_WHILE_TORCHRUN_IS_SLOW), ["a"]))
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["a"], seconds=60)
    failure = operator.reports["a"].failure
    assert failure is not None
    assert (failure.reason, failure.exit_code) == (FailureReason.KILLED, -9)
