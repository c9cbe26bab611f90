"""Sample order, batch shares and audit: properties of pure functions."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from full_disk import NO_SPACE
from one_rank_runs import train
from spottrain.data.audit import AuditHeader, AuditRecord, AuditWriter, read_audit
from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.order import Permutation
from spottrain_planner.batch_sizes import micro_batch_sizes, sizes_that_differ

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**64)


@given(sizes, seeds, st.integers(0, 5))
def test_every_epoch_has_each_sample_exactly_once(num_samples: int, seed: int, epoch: int) -> None:
    order = Permutation(num_samples=num_samples, seed=seed)
    positions = range(epoch * num_samples, (epoch + 1) * num_samples)
    assert sorted(order.samples(positions)) == list(range(num_samples))


@given(sizes, seeds, st.lists(st.integers(0, 2000), max_size=20))
def test_a_sample_depends_on_its_position_alone(num_samples: int, seed: int, positions: list[int]) -> None:
    order = Permutation(num_samples=num_samples, seed=seed)
    together = order.samples(positions).tolist()
    assert together == [order.samples([position]).item() for position in positions]


def test_epochs_and_seeds_differ_and_the_order_is_even() -> None:
    order = Permutation(num_samples=1000, seed=1)
    first, second = order.samples(range(1000)), order.samples(range(1000, 2000))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, Permutation(num_samples=1000, seed=2).samples(range(1000)))
    # Of a random permutation, neighbours are neighbours again in 2 of 1000 places.
    assert np.count_nonzero(np.abs(np.diff(first)) == 1) < 15
    assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.12


def test_the_order_never_changes_between_versions() -> None:
    """A job that runs over an upgrade of the library must go on in the same order."""
    assert Permutation(num_samples=10, seed=7).samples(range(12)).tolist() == ORDER_OF_10_WITH_SEED_7


ORDER_OF_10_WITH_SEED_7 = [1, 8, 4, 2, 6, 0, 3, 5, 9, 7, 7, 3]


def test_huge_datasets_cost_nothing() -> None:
    order = Permutation(num_samples=2**45 + 1, seed=3)
    samples = order.samples([0, 2**44, 2**45, 2**46])
    assert len(set(samples.tolist())) == 4
    assert samples.max() <= 2**45


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="the dataset has no samples"):
        Permutation(num_samples=0)


def plan_of(units: int, units_at_once: int, world_size: int, multiple_of: int) -> BatchPlan:
    return BatchPlan(
        global_batch=units * multiple_of,
        micro_batch=units_at_once * multiple_of,
        world_size=world_size,
        multiple_of=multiple_of,
    )


plans = st.builds(plan_of, st.integers(1, 60), st.integers(1, 12), st.integers(1, 17), st.integers(1, 4))


@st.composite
def plans_and_batches(draw: st.DrawFn) -> tuple[BatchPlan, range]:
    """A plan, and a batch that is as large as the plan's or smaller."""
    plan, begin = draw(plans), draw(st.integers(0, 1000))
    return plan, range(begin, begin + draw(st.integers(1, plan.global_batch // plan.multiple_of)) * plan.multiple_of)


@given(plans_and_batches())
def test_a_step_uses_each_position_once_and_in_order(drawn: tuple[BatchPlan, range]) -> None:
    plan, batch = drawn
    used = chain.from_iterable(
        list(micro.positions)[: micro.num_samples]
        for rank in range(plan.world_size)
        for micro in plan.micro_batches(rank, batch)
    )
    assert list(used) == list(batch)


@given(plans_and_batches())
def test_ranks_run_alike_and_no_micro_batch_is_too_large(drawn: tuple[BatchPlan, range]) -> None:
    plan, batch = drawn
    for rank in range(plan.world_size):
        micro_batches = plan.micro_batches(rank, batch)
        assert len(micro_batches) == plan.num_micro_batches
        assert all(1 <= len(micro.positions) <= plan.micro_batch for micro in micro_batches)
        assert all(len(micro.positions) % plan.multiple_of == 0 for micro in micro_batches)
        assert [micro.is_last for micro in micro_batches] == [False] * (len(micro_batches) - 1) + [True]
        assert abs(len(plan.share(rank, batch)) - len(batch) / plan.world_size) < plan.multiple_of


@given(plans_and_batches())
def test_the_micro_batches_of_a_rank_have_about_the_same_size(drawn: tuple[BatchPlan, range]) -> None:
    plan, batch = drawn
    for rank in range(plan.world_size):
        sizes = [micro.num_samples for micro in plan.micro_batches(rank, batch)]
        assert max(sizes) - min(sizes) <= plan.multiple_of


@given(plans)
def test_the_sizes_that_are_said_are_those_of_the_micro_batches(plan: BatchPlan) -> None:
    assume(plan.multiple_of == 1)
    sizes = {
        micro.num_samples
        for rank in range(plan.world_size)
        for micro in plan.micro_batches(rank, range(plan.global_batch))
    } - {0}
    assert micro_batch_sizes(plan.global_batch, plan.micro_batch, plan.world_size) == tuple(sorted(sizes))


@pytest.mark.parametrize(("world_size", "sizes"), [(2, {16}), (3, {14, 16}), (5, {12, 14})])
def test_mixup_has_even_micro_batches_at_any_number_of_ranks(world_size: int, sizes: set[int]) -> None:
    plan = BatchPlan(global_batch=128, micro_batch=16, world_size=world_size, multiple_of=2)
    assert {
        len(each.positions) for rank in range(world_size) for each in plan.micro_batches(rank, range(384, 512))
    } == sizes


def test_a_batch_that_holds_no_multiple_is_refused() -> None:
    plan = BatchPlan(global_batch=32, micro_batch=8, world_size=3, multiple_of=2)
    with pytest.raises(ValueError, match=r"a batch has 7 samples, .*batch\.multipleOf is 2"):
        plan.micro_batches(0, range(7))


@pytest.mark.parametrize("multiple_of", [0, 3, 16])
def test_a_multiple_that_the_batch_does_not_hold_is_refused(multiple_of: int) -> None:
    with pytest.raises(ValueError, match=r"batch\.global"):
        BatchPlan(global_batch=32, micro_batch=8, world_size=1, multiple_of=multiple_of)


@pytest.mark.parametrize(
    ("worlds", "sentence"),
    [
        ([1, 2, 4], None),
        ([1, 2, 3, 4], "Samples of a micro-batch: 8 at 1, 2 and 4 ranks, 5 or 6 at 3 ranks."),
        ([3], "Samples of a micro-batch: 5 or 6 at 3 ranks."),
        ([4, 8], "Samples of a micro-batch: 8 at 4 ranks, 4 at 8 ranks."),
    ],
)
def test_sizes_that_depend_on_the_number_of_ranks_are_said(worlds: list[int], sentence: str | None) -> None:
    said = sizes_that_differ(32, 8, worlds)
    assert said is None if sentence is None else said is not None and said.startswith(sentence)


@given(plans_and_batches())
def test_weighted_and_averaged_gradients_are_the_mean_over_the_batch(drawn: tuple[BatchPlan, range]) -> None:
    plan, batch = drawn
    values = np.random.default_rng(0).normal(size=batch.stop)
    of_ranks = [
        sum(micro.loss_weight * values[list(micro.positions)].mean() for micro in plan.micro_batches(rank, batch))
        for rank in range(plan.world_size)
    ]
    assert np.mean(of_ranks) == pytest.approx(values[list(batch)].mean(), abs=1e-12)


HEADER = AuditHeader(seed=9, shuffle=True, num_samples=20, global_batch=4)


def write_steps(
    folder: Path,
    generation: int,
    world: int,
    steps: range,
    *,
    attempt: str = "",
    without_rank: int | None = None,
    late: float = 0.0,
) -> None:
    order, plan = Permutation(num_samples=20, seed=9), BatchPlan(global_batch=4, micro_batch=4, world_size=world)
    for rank in range(world):
        if rank == without_rank:
            continue
        writer = AuditWriter(folder, HEADER, generation=generation, rank=rank)
        for step in steps:
            share = plan.share(rank, Batches(order, 4).at(step - 1).positions)
            writer.write(
                AuditRecord(
                    at=step + late,
                    generation=generation,
                    attempt=attempt,
                    step=step,
                    rank=rank,
                    world=world,
                    positions=tuple(share),
                    samples=tuple(order.samples(share).tolist()),
                )
            )


def test_an_audit_takes_each_step_from_the_newest_generation_that_completed_it(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3, range(1, 6))
    write_steps(tmp_path, 2, 2, range(4, 9), late=10.0)
    write_steps(tmp_path, 3, 2, range(9, 10), without_rank=1)
    audit = read_audit(tmp_path)
    assert [(step.step, step.generation) for step in audit.steps] == [
        *((step, 1) for step in (1, 2, 3)),
        *((step, 2) for step in (4, 5, 6, 7, 8)),
    ]
    assert audit.num_redone == 2
    assert audit.problems(8) == []
    assert audit.problems(9) == ["1 steps were completed by no generation, the first of them step 9"]


def test_an_audit_distinguishes_a_generation_from_that_of_a_later_job_with_the_same_number(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 1, range(1, 4), attempt="former-g1")
    write_steps(tmp_path, 2, 3, range(3, 8), attempt="former-g2", late=10.0)
    write_steps(tmp_path, 1, 2, range(6, 10), attempt="later-g1", late=20.0)
    write_steps(tmp_path, 2, 2, range(9, 11), attempt="later-g2", late=30.0)
    audit = read_audit(tmp_path)
    assert [(step.step, step.generation, step.world) for step in audit.steps] == [
        *((step, 1, 1) for step in (1, 2)),
        *((step, 2, 3) for step in (3, 4, 5)),
        *((step, 1, 2) for step in (6, 7, 8)),
        *((step, 2, 2) for step in (9, 10)),
    ]
    assert audit.num_redone == 4
    assert audit.problems(10) == []


def test_the_ranks_of_two_attempts_complete_no_step_together(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, range(1, 2), attempt="former-g1", without_rank=1)
    write_steps(tmp_path, 1, 2, range(1, 2), attempt="later-g1", without_rank=0)
    assert read_audit(tmp_path).steps == ()


def test_the_time_without_a_step_ends_with_the_first_step_that_is_done_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, range(1, 4))
    write_steps(tmp_path, 2, 1, range(1, 9), late=10.0)
    audit = read_audit(tmp_path)
    assert audit.longest_gap(3.5, 12.0) == 8.0
    assert audit.longest_gap(12.5, 20.0) == 1.0


def test_an_audit_reports_a_wrong_order(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 1, range(1, 3))
    wrong = AuditRecord(at=3.0, generation=1, step=3, rank=0, world=1, positions=(8, 9, 10, 11), samples=(1, 2, 3, 4))
    AuditWriter(tmp_path, HEADER, generation=1, rank=0).write(wrong)
    assert read_audit(tmp_path).problems() == ["step 3 used other samples than an uninterrupted run"]


def test_a_full_disk_ends_the_record_of_a_rank_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = tmp_path / "audit-000001-00001.jsonl"
    full.symlink_to("/dev/full")
    write_steps(tmp_path, 1, 2, range(1, 4))
    assert [record.message for record in caplog.records] == [
        f"Samples are no longer recorded in {full}, and training goes on: {NO_SPACE}"
    ]
    full.unlink()
    write_steps(tmp_path, 2, 1, range(4, 6))
    assert read_audit(tmp_path).problems() == ["3 steps were completed by no generation, the first of them step 1"]


@pytest.mark.usefixtures("world_of_its_own")
def test_a_folder_for_audits_that_cannot_be_made_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "audit"
    monkeypatch.setenv("SPOTTRAIN_AUDIT_DIR", str(folder))
    with pytest.raises(SystemExit, match="1"):
        train(f"file://{tmp_path}/checkpoints", None, 2)
    assert (
        f"SPOTTRAIN_AUDIT_DIR is {folder}, and that folder can't be made: Not a directory; name one on a volume to "
        "which the trainer may write, or leave it out"
    ) in capsys.readouterr().err


def test_a_folder_without_audits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no audit files"):
        read_audit(tmp_path)
