"""Real agents, a real zygote and real torchrun on gloo.

The test plays their operator.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_pods import GATHER, TRAIN_FOREVER, WAIT, FakeOperator, Pods, appears, becomes_true, drain, said
from spottrain_agent.processes import descendants, is_alive
from spottrain_api.contract.assignments import AgentPhase, AssignmentAction
from spottrain_api.contract.names import FILE_AT_RISK, FILE_DRAIN
from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_api.contract.reports import FailureReason
from spottrain_api.settings.entrypoint import Entrypoint


async def test_three_members_run_and_the_next_generation_starts_within_seconds(
    pods: Pods, operator: FakeOperator
) -> None:
    names = ["a", "b", "c"]
    pods.start(*names)
    await pods.warm()
    entrypoint = pods.script(GATHER)

    await operator.assign(pods.generation(1, entrypoint, names))
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 1, names)
    assert [(pods.folder / str(rank)).read_text() for rank in range(3)] == [f"3 __main__ {entrypoint.script}"] * 3

    began = time.monotonic()
    await operator.assign(pods.generation(2, entrypoint, names[:2]))
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 2, names[:2], seconds=15)
    print(f"generation 2 ran from start to end in {time.monotonic() - began:.2f} s")
    assert (pods.folder / "1").read_text().startswith("2 ")


async def test_nothing_of_a_generation_listens_on_other_addresses(pods: Pods, operator: FakeOperator) -> None:
    """gloo listens on loopback here, because addresses of pods are loopback's."""
    names = ["a", "b"]
    pods.start(*names)
    await pods.warm()
    run = pods.generation(1, pods.script(TRAIN_FOREVER), names)
    asked = run["a"].generation
    assert asked is not None
    run["a"] = run["a"].model_copy(update={"generation": asked.model_copy(update={"replica_token": "t"})})
    await operator.assign(run)
    await appears(pods.folder / "started-0")
    for name, process in pods.processes.items():
        members = [psutil.Process(pid) for pid in (process.pid, *descendants(process.pid))]
        listening = {
            connection.laddr.ip
            for member in members
            for connection in member.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1", pods.addresses[name]}  # the relay; for "a", rendezvous store and replicas


async def test_a_plain_script_drains_on_sigterm(pods: Pods, operator: FakeOperator) -> None:
    names = ["a", "b"]
    pods.start(*names)
    await pods.warm()
    run = pods.generation(1, pods.script(TRAIN_FOREVER), names, processes_per_node=2)
    await operator.assign(run)
    await appears(pods.folder / "started-0")

    await operator.assign({name: drain(assignment) for name, assignment in run.items()})
    await operator.wait_for_phase(AgentPhase.DRAINED, 1, names, seconds=20)

    assert sorted(p.name for p in pods.folder.glob("saved-*")) == [f"saved-{rank}" for rank in range(4)]
    assert (pods.folder / "saved-0").read_text() == "20"


async def test_stop_kills_workers_and_their_children_in_sessions_of_their_own(
    pods: Pods, operator: FakeOperator
) -> None:
    pods.start("a")
    await pods.warm()
    script = """
        import os, pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        grandchild = subprocess.Popen(["sh", "-c", "setsid sleep 1000 & echo $!"], stdout=subprocess.PIPE)
        pid = int(grandchild.stdout.readline())
        pathlib.Path(sys.argv[1], "pids").write_text(f"{os.getpid()} {child.pid} {pid}")
        time.sleep(1000)
    """
    run = pods.generation(1, pods.script(script), ["a"])
    await operator.assign(run)
    pids = [int(pid) for pid in (await said(pods.folder / "pids")).split()]
    assert all(is_alive(pid) for pid in pids)

    stop = run["a"].model_copy(update={"action": AssignmentAction.STOP})
    await operator.assign({"a": stop})
    await operator.wait_for_phase(AgentPhase.STOPPED, 1, ["a"], seconds=5)
    await becomes_true(lambda: not any(is_alive(pid) for pid in pids), seconds=5)


async def test_a_hang_shows_where_each_rank_stands_before_it_is_killed(
    pods: Pods, operator: FakeOperator, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 waits in a collective for rank 1, which is elsewhere."""
    pods.start("a", cold=True)
    await pods.warm()
    script = """
        import os, pathlib, sys, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        def is_elsewhere():
            time.sleep(1000)
        def waits_for_the_others():
            dist.all_reduce(torch.ones(1))
        pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
        is_elsewhere() if os.environ["RANK"] == "1" else waits_for_the_others()
    """
    run = pods.generation(1, pods.script(script), ["a"], processes_per_node=2)
    await operator.assign(run)
    for rank in range(2):
        await appears(pods.folder / str(rank))
    stop = run["a"].model_copy(update={"action": AssignmentAction.STOP, "show_stacks": True})
    await operator.assign({"a": stop})
    await operator.wait_for_phase(AgentPhase.STOPPED, 1, ["a"])
    started = json.loads((pods.folder / "run-a/g1/worker-1.json").read_text())
    await becomes_true(lambda: not is_alive(started["pid"]), seconds=10)
    _, first, second = capfd.readouterr().err.split("generation 1 hangs; rank ")
    assert first.startswith("0 stands here:")
    assert "in waits_for_the_others" in first
    assert second.startswith("1 stands here:")
    assert "in is_elsewhere" in second
    assert "runpy" not in first + second


IN_A_SESSION = """
        import logging
        with spottrain.session():
            logging.getLogger("spottrain.test").warning("in a session")
"""


def json_lines(text: str) -> list[dict[str, Any]]:
    """The lines of agents and of the library in ranks; all others are text."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


async def test_a_script_with_a_session_has_a_writer_beside_it_that_ends_with_it(
    pods: Pods, operator: FakeOperator, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its log and the agent's say in each line what the line is about."""
    pods.start("a", cold=True, SPOTTRAIN_LOG_FORMAT="json", SPOTTRAIN_JOB="job", SPOTTRAIN_NAMESPACE="team")
    await pods.warm()
    script = """
        import pathlib, sys, time
        from spottrain.checkpoint.saving.writer import started_writer
        writer = started_writer()
        pathlib.Path(sys.argv[1], "pid").write_text(str(writer and writer.pid))
        while {names_session} and not pathlib.Path(sys.argv[1], "go on").exists():
            time.sleep(0.01)
    """
    await operator.assign(pods.generation(1, pods.script(script.format(names_session=False)), ["a"]))
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 1, ["a"])
    assert (pods.folder / "pid").read_text() == "None"
    (pods.folder / "pid").unlink()

    with_session = script.replace("import pathlib", "import spottrain, pathlib").format(
        names_session="spottrain.session"
    )
    await operator.assign(pods.generation(2, pods.script(with_session + IN_A_SESSION), ["a"]))
    pid = int(await said(pods.folder / "pid"))
    assert is_alive(pid)
    (pods.folder / "go on").touch()
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 2, ["a"])
    await becomes_true(lambda: not is_alive(pid), seconds=5)

    lines = json_lines(capfd.readouterr().err)
    assert {(line["namespace"], line["job"], line["member"]) for line in lines} == {("team", "job", "a")}
    agents = [line for line in lines if line["program"] == "spottrain-agent"]
    assert [line["generation"] for line in agents if ": torchrun " in line["message"]] == [1, 2]
    [rank] = [line for line in lines if line["program"] == "spottrain"]
    assert (rank["message"], rank["generation"], rank["rank"]) == ("in a session", 2, 0)


async def test_when_a_member_vanishes_the_others_report_a_lost_peer_and_can_go_on(
    pods: Pods, operator: FakeOperator
) -> None:
    names = ["a", "b", "c"]
    pods.start(*names)
    await pods.warm()
    entrypoint = pods.script(TRAIN_FOREVER)
    await operator.assign(pods.generation(1, entrypoint, names))
    await appears(pods.folder / "started-0")

    pods.kill("a")  # hosts the store
    began = time.monotonic()
    await operator.wait_for_phase(AgentPhase.FAILED, 1, ["b", "c"], seconds=10)
    print(f"survivors reported after {time.monotonic() - began:.2f} s")
    reasons = {operator.reports[name].failure.reason for name in ["b", "c"]}  # type: ignore[union-attr]
    assert reasons == {FailureReason.LOST_PEER}

    (pods.folder / "started-0").unlink()
    await operator.assign(pods.generation(2, entrypoint, ["b", "c"]))
    await appears(pods.folder / "started-0", seconds=20)
    print(f"generation 2 stepped {time.monotonic() - began:.2f} s after the kill")


async def test_a_zygote_that_dies_is_replaced(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await pods.warm()
    (zygote,) = descendants(pods.processes["a"].pid)
    os.kill(zygote, signal.SIGKILL)
    await operator.assign(pods.generation(1, pods.script("print('ran')"), ["a"]))
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 1, ["a"])


async def test_stop_while_the_zygote_still_warms_up_leaves_nothing_to_start(
    pods: Pods, operator: FakeOperator
) -> None:
    pods.start("a", cold=True)
    await operator.wait_for(lambda: "a" in operator.reports)
    assert not operator.reports["a"].warm
    late = pods.generation(1, pods.script(TRAIN_FOREVER), ["a"])
    await operator.assign(late)
    await operator.wait_for_phase(AgentPhase.STARTING, 1, ["a"])
    await operator.assign({"a": late["a"].model_copy(update={"action": AssignmentAction.STOP})})
    await operator.wait_for_phase(AgentPhase.STOPPED, 1, ["a"])
    await operator.assign(pods.generation(2, pods.script("print('ran')"), ["a"]))
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 2, ["a"])
    assert not (pods.folder / "started-0").exists()


async def test_nothing_survives_an_agent_that_is_killed_alone(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script(TRAIN_FOREVER), ["a"]))
    await appears(pods.folder / "started-0")
    left = descendants(pods.processes["a"].pid)
    assert len(left) >= 3  # zygote, torchrun, worker
    pods.processes["a"].kill()
    await becomes_true(lambda: not any(is_alive(pid) for pid in left), seconds=5)


async def test_a_module_runs_as_python_m_would(pods: Pods, operator: FakeOperator) -> None:
    package = pods.folder / "trainer_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import atexit, os, sys, torch\n"
        "open('threads', 'w').write(str(torch.get_num_threads()))\n"
        "atexit.register(lambda: open('exit', 'w').write('bye'))\n"
        "open('ran', 'w').write(' '.join([__name__, __package__, *sys.argv[1:], str(sys.path[0] == os.getcwd())]))\n"
    )
    pods.start("a", OMP_NUM_THREADS="3")  # the zygote has one
    await pods.warm()
    entrypoint = Entrypoint(module="trainer_package", args=("--log", "1"), working_dir=str(pods.folder))
    await operator.assign(pods.generation(1, entrypoint, ["a"]))
    await operator.wait_for_phase(AgentPhase.SUCCEEDED, 1, ["a"])
    assert (pods.folder / "ran").read_text() == "__main__ trainer_package --log 1 True"
    assert (pods.folder / "exit").read_text() == "bye"
    assert (pods.folder / "threads").read_text() == "3"


async def test_a_notice_drains_while_the_operator_is_down(pods: Pods, operator: FakeOperator, tmp_path: Path) -> None:
    port = operator.url.rpartition(":")[2]
    pods.start("a", SPOTTRAIN_CAPACITY_TYPE="spot", SPOTTRAIN_HOST_IP="127.0.0.1", SPOTTRAIN_WATCHER_PORT=port)
    await pods.warm()
    await operator.assign(pods.generation(1, pods.script(TRAIN_FOREVER), ["a"]))
    await appears(pods.folder / "started-0")
    # From here on the operator's half answers nobody.
    operator.assignments["a"] = WAIT
    now = datetime.now(UTC)
    notice = Notice(id="1", node="node-a", source="ec2", deadline=now + timedelta(seconds=15), observed_at=now)
    began = time.monotonic()
    await operator.announce(notice)
    await appears(tmp_path / "run-a" / "g1" / "drain.json", seconds=5)
    print(f"notice to drain.json: {time.monotonic() - began:.3f} s")
    await operator.wait_for_phase(AgentPhase.DRAINED, 1, ["a"], seconds=20)
    assert operator.reports["a"].notices == (notice,)


async def test_a_recommendation_reports_a_risk_to_the_ranks_and_drains_nobody(
    pods: Pods, operator: FakeOperator, tmp_path: Path
) -> None:
    port = operator.url.rpartition(":")[2]
    pods.start("a", SPOTTRAIN_CAPACITY_TYPE="spot", SPOTTRAIN_HOST_IP="127.0.0.1", SPOTTRAIN_WATCHER_PORT=port)
    await pods.warm()
    now = datetime.now(UTC)
    hint = Notice(
        id="1",
        node="node-a",
        kind=NoticeKind.REBALANCE,
        source="ec2",
        deadline=now,
        observed_at=now,
    )
    await operator.announce(hint)
    await operator.assign(pods.generation(1, pods.script(TRAIN_FOREVER), ["a"]))
    folder = tmp_path / "run-a" / "g1"
    await appears(folder / FILE_AT_RISK)
    await operator.announce(hint.model_copy(update={"cancelled": True}))
    await operator.wait_for(lambda: not (folder / FILE_AT_RISK).exists())
    assert operator.reports["a"].phase in (AgentPhase.STARTING, AgentPhase.RUNNING)
    assert not (folder / FILE_DRAIN).exists()


@pytest.mark.parametrize(
    ("nodes_grace", "grace"),
    [(None, 20), (15, 15), (60, 20)],
)
async def test_sigterm_drains_by_the_shorter_grace_reports_and_leaves(
    pods: Pods, operator: FakeOperator, nodes_grace: float | None, grace: float
) -> None:
    pods.start("a")  # the pod has 20 s
    await pods.warm()
    run = pods.generation(1, pods.script(TRAIN_FOREVER), ["a"])["a"]
    await operator.assign({"a": run.model_copy(update={"shutdown_grace_seconds": nodes_grace})})
    await appears(pods.folder / "started-0")
    pods.processes["a"].send_signal(signal.SIGTERM)
    await operator.wait_for_phase(AgentPhase.DRAINED, 1, ["a"], seconds=20)
    [notice] = operator.reports["a"].notices
    assert (notice.source, (notice.deadline - notice.observed_at).total_seconds()) == ("sigterm", grace)
    assert await asyncio.to_thread(pods.processes["a"].wait, 20) == 0
    assert (pods.folder / "saved-0").read_text() == f"{grace}", "a script without the library learns it, too"


async def test_what_is_known_of_the_nodes_shutdown_outlives_the_node_object(
    pods: Pods, operator: FakeOperator
) -> None:
    pods.start("a")
    await pods.warm()
    for number, nodes_grace in ((1, 15.0), (2, None)):
        run = pods.generation(number, pods.script(TRAIN_FOREVER), ["a"])["a"]
        await operator.assign({"a": run.model_copy(update={"shutdown_grace_seconds": nodes_grace})})
        await operator.wait_for_phase(AgentPhase.RUNNING, number, ["a"])
    await appears(pods.folder / "started-0")
    pods.processes["a"].send_signal(signal.SIGTERM)
    await operator.wait_for(lambda: bool(operator.reports["a"].notices))
    [notice] = operator.reports["a"].notices
    assert (notice.deadline - notice.observed_at).total_seconds() == 15


async def test_an_idle_agent_leaves_at_once_on_sigterm(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a", cold=True)
    await operator.wait_for(lambda: "a" in operator.reports)
    pods.processes["a"].send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(pods.processes["a"].wait, 5) == 0
