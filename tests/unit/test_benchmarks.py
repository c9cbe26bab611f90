"""Benchmarks that fail or are interrupted: what they leave, and what they print."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from benchmarks import bench_checkpoint, bench_notice, bench_recovery, bench_replicas
from benchmarks.loading import corpus, readers
from benchmarks.recovery import managed
from benchmarks.recovery.job import Job, cost_of
from benchmarks.recovery.outcome import SETTLED_STEPS, CompletedStep, Outcome, outcome_of

from spottrain_local.layout import LocalClusterError


class FakeCluster:
    """Records what is done with it."""

    kubeconfig = "no kubeconfig"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def up(self, spec: object) -> None:
        self.calls.append("up")

    def down(self, *, delete: bool) -> None:
        self.calls.append("down")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """The cluster that the benchmarks open."""
    found = FakeCluster()
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", "")
    monkeypatch.setattr(managed, "open_cluster", lambda name: found)
    return found


def fail_to_install(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def install(cluster: object) -> None:
        raise error

    monkeypatch.setattr(managed, "install_operator", install)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), LocalClusterError("Helm failed.")], ids=repr)
def test_a_start_that_ends_halfway_takes_the_cluster_down(
    error: BaseException, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_install(monkeypatch, error)
    with pytest.raises(type(error)), managed.managed_job(tmp_path):
        pass
    assert cluster.calls == ["up", "down"]


@pytest.mark.parametrize("error", [TimeoutError("The operator is not ready."), LocalClusterError("Helm failed.")])
def test_a_cluster_that_does_not_start_is_reported_in_a_sentence(
    error: Exception,
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_to_install(monkeypatch, error)
    monkeypatch.setattr(sys, "argv", ["bench_notice", "--out", str(tmp_path)])
    monkeypatch.setattr(bench_notice, "clean_up_on_sigterm", lambda: None)
    assert bench_notice.main() == 2
    assert capsys.readouterr().err == f"bench_notice: {error}\n"
    assert cluster.calls == ["up", "down"]


class LostJob(managed.ManagedJob):
    """A job that makes no step after the fault."""

    def __init__(self) -> None: ...

    def wait_until_whole(self, warm_steps: int) -> None: ...

    def hurt(self, case: str) -> None: ...

    def steps(self) -> list[CompletedStep]:
        return [CompletedStep(1.0, 1, 4), CompletedStep(2.0, 2, 4)]


def test_a_job_that_does_not_step_again_has_that_outcome() -> None:
    assert managed.cost_of("sigkill", LostJob(), patience_seconds=0.0) == Outcome(None, None)


def steps_at(start: float, seconds: float, numbers: range, world_size: int) -> list[CompletedStep]:
    """Steps at even distances."""
    return [CompletedStep(start + seconds * index, number, world_size) for index, number in enumerate(numbers)]


@pytest.mark.parametrize("gap", [0.25, 1.5, 60.0])
@pytest.mark.parametrize("redone", [0, 5])
def test_cost_is_counted_where_the_smaller_world_begins(gap: float, redone: int) -> None:
    """Also if the old one makes many steps after the fault, and where a step of it was as slow."""
    whole = [CompletedStep(1.0, 0, 4), *steps_at(100.0, 0.02, range(1, 101), 4)]
    hurt_at, stopped_at = whole[30].at + 0.001, whole[-1].at
    smaller = steps_at(stopped_at + gap, 0.03, range(101 - redone, 201), 3)
    found = outcome_of(lambda: whole + smaller, hurt_at, 1.0)
    assert found.seconds_without_step == pytest.approx(gap)
    assert found.steps_redone == redone
    assert found.stopped_at == stopped_at


@pytest.mark.parametrize("settled", [0, 1, SETTLED_STEPS - 1])
def test_cost_is_not_counted_before_the_smaller_world_has_settled(settled: int) -> None:
    whole = steps_at(100.0, 0.02, range(1, 101), 4)
    smaller = steps_at(200.0, 0.02, range(101, 101 + settled), 3)
    assert outcome_of(lambda: whole + smaller, whole[30].at, 0.05) == Outcome(None, None)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_round_in_which_the_job_did_not_step_again_is_the_result(lost: int, tmp_path: Path) -> None:
    rounds = [Outcome(2.0, 1, phases={"first step": 2.0})] * 2
    rounds[lost] = Outcome(None, None)
    left = iter(rounds * len(bench_recovery.CASES))
    side = bench_recovery.Side("spottrain", lambda case, folder: next(left))
    results = bench_recovery.run(tmp_path, {"spottrain": side}, bench_recovery.CASES, 2)
    assert [result.outcomes for result in results] == [{"spottrain": Outcome(None, None)}] * len(bench_recovery.CASES)
    assert bench_recovery.shown(Outcome(None, None)) == ("not within 400", "–")


def test_a_case_that_a_side_does_not_have_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = []

    def measure(case: str, folder: Path) -> Outcome:
        measured.append((case, folder.name))
        return Outcome(0.25, 3)

    sides = {"a": bench_recovery.Side("first", measure), "b": bench_recovery.Side("second", measure, False)}
    results = bench_recovery.run(tmp_path, sides, bench_recovery.CASES, 1)
    assert measured == [
        ("sigterm", "a"), ("sigterm", "b"), ("sigkill", "a"), ("sigkill", "b"), ("store-host", "a")
    ]  # fmt: skip
    capsys.readouterr()
    bench_recovery.print_tables(results)
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    assert [row[2:5] for row in rows if len(row) > 4 and row[2] == "second"] == [
        ["second", "0.2", "3"], ["second", "0.2", "3"], ["second", "–", "–"]
    ]  # fmt: skip
    bench_recovery.plot(results, tmp_path / "recovery.svg")
    assert "second" in (tmp_path / "recovery.svg").read_text()


def test_a_job_that_ends_before_the_fault_is_reported_in_a_sentence(tmp_path: Path) -> None:
    before = psutil.Process().children()
    ended = Job(tmp_path, members=[["true"]], services=[["sleep", "1000"]])
    with pytest.raises(SystemExit, match=r"The job ended before step 150; see .*job\.log\."):
        cost_of("sigkill", ended, patience_seconds=0.0)
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize(
    ("benchmark", "option", "value", "sentence"),
    [
        (bench_checkpoint, "--mib", "0", "--mib is a multiple of 32, so that each way saves as many bytes"),
        (bench_checkpoint, "--mib", "16", "--mib is a multiple of 32, so that each way saves as many bytes"),
        (bench_checkpoint, "--mib", "48", "--mib is a multiple of 32, so that each way saves as many bytes"),
        (bench_replicas, "--blocks", "1", "--blocks is at least 2: the standard error is of several pairs"),
    ],
)
def test_what_would_give_no_table_is_refused_before_the_work(
    benchmark: ModuleType,
    option: str,
    value: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("it starts")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "clean_up_on_sigterm", lambda: None)
    monkeypatch.setattr(benchmark.tempfile, "TemporaryDirectory", work)
    monkeypatch.setattr(sys, "argv", ["benchmark", option, value])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {sentence}\n")


def test_ways_to_read_shards_get_the_same_samples(tmp_path: Path) -> None:
    corpus.write_bin(tmp_path / "bin", num_shards=1)
    corpus.make_indices(tmp_path)

    def read(read_batches: readers.Read, name: str) -> list[list[int]]:
        reading = readers.Reading(folder=tmp_path, cache=tmp_path / name, batch=50, workers=0)
        with closing(read_batches("bin", reading, None)) as batches:
            return sorted(sample.tolist() for batch in batches.batches for sample in batch)

    found = read(readers.ours, "ours")
    assert len(found) == corpus.SAMPLES_PER_SHARD
    assert found == read(readers.plain, "plain")
    assert corpus.tokens(0).tolist()[:-1] in (sample[:-1] for sample in found)
