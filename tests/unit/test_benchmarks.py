"""Benchmarks that fail or are interrupted: what they leave, and what they print."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks import bench_checkpoint, bench_notice, bench_recovery, bench_replicas
from benchmarks.loading import corpus, readers
from benchmarks.recovery import managed, plain
from benchmarks.recovery.outcome import CompletedStep, Outcome

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

    def __init__(self) -> None:
        self.restored: list[str] = []

    def wait_until_whole(self, warm_steps: int) -> None: ...

    def hurt(self, case: str) -> str:
        return "spot-0"

    def steps(self) -> list[CompletedStep]:
        return [CompletedStep(1.0, 1), CompletedStep(2.0, 2)]

    def restore(self, node: str) -> None:
        self.restored.append(node)


def test_a_job_that_does_not_step_again_has_that_outcome() -> None:
    job = LostJob()
    found = managed.measure(job, "sigkill", warm_steps=1, patience_seconds=0.0)
    assert found == (Outcome(None, None), {})
    assert job.restored == ["spot-0"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_round_in_which_the_job_did_not_step_again_is_the_result(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [(Outcome(2.0, 1), {"first step": 2.0})] * 2
    rounds[lost] = Outcome(None, None), {}
    left = iter(rounds * len(bench_recovery.CASES))
    monkeypatch.setattr(plain, "measure", lambda *_, **__: Outcome(40.0, 1))
    monkeypatch.setattr(managed, "managed_job", lambda folder: nullcontext())
    monkeypatch.setattr(managed, "measure", lambda *_, **__: next(left))
    results = bench_recovery.run(tmp_path, 2)
    assert {bench_recovery.shown(result.spottrain) for result in results} == {("not within 400", "–")}
    assert [result.phases for result in results] == [{}] * len(bench_recovery.CASES)


def test_torchrun_that_ends_before_the_fault_is_reported_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndedJob:
        log_file = tmp_path / "torchrun.log"
        looks = closed = 0

        def steps(self) -> list[CompletedStep]:
            self.looks += 1
            assert self.looks == 1, "it waits for a job that has ended"
            return []

        def has_ended(self) -> bool:
            return True

        def close(self) -> None:
            self.closed += 1

    job = EndedJob()
    monkeypatch.setattr(plain, "PlainJob", lambda folder, port: job)
    with pytest.raises(SystemExit, match=r"All torchrun agents ended before step 150; see .*torchrun\.log\."):
        plain.measure("sigkill", tmp_path, 0, warm_steps=150, patience_seconds=0.0)
    assert job.closed == 1


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
