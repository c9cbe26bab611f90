"""Ranks under DeepSpeed on gloo.

ZeRO trains as DDP does at every stage, and resumes at any world size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commits import newest_commit
from forked_ranks import forked_ranks, rank_environments
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import FROZEN_SUFFIX
from spottrain.checkpoint.loading.export import export
from spottrain.checkpoint.stores.uri import open_storage
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.reports import FailureReason, Outcome, OutcomeKind, Progress
from spottrain_api.settings.checkpoint import CheckpointConfig
from spottrain_api.settings.choices import Precision, Strategy
from spottrain_api.settings.interval import Interval
from spottrain_api.settings.training import Batch, DeepSpeedConfig

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("deepspeed_script.py")
STEPS = 6
# Several flat tensors a parameter group, and no parameter that stays whole.
SMALL_SUB_GROUPS = {"zero_optimization": {"sub_group_size": 20, "stage3_param_persistence_threshold": 0}}
# Each node keeps a copy of the whole model.
KEPT_BY_NODES = {"zero_optimization": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}}


@dataclass
class Job:
    """One job: generations of ranks over one checkpoint folder.

    What it trained is what it committed.
    """

    folder: Path
    fork: Any
    strategy: str = "deepspeed"
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    deepspeed_config: dict[str, Any] | str | None = None
    precision: str = "fp32"
    cpu_has_fp16: bool | None = None
    activation_checkpointing: bool = False
    optimizer: str = "adamw"
    has_schedule: bool = True
    dropout: float = 0.0
    clip_grad_norm: float | None = 1.0
    global_batch: int = 10
    mixed_after: int | None = None
    export_first: bool = False
    model: Path | None = None  # where rank 0 saves the whole model at the end, as DeepSpeed gathers it
    generation: int = 0
    outcomes: list[Outcome | None] = field(default_factory=list)

    def train(
        self,
        world_size: int,
        *,
        drain_at: int | None = None,
        steps: int = STEPS,
        echo: bool = False,
        with_torchrun: bool = True,
    ) -> None:
        """Run the next generation to its end.

        `echo`: what it has loaded is committed as step 1000 + generation.
        """
        self.generation += 1
        environments = rank_environments(world_size) if with_torchrun else [{}]
        settings = [
            self._settings(rank, environment, drain_at, steps, echo) for rank, environment in enumerate(environments)
        ]
        with forked_ranks(self.fork, SCRIPT, settings):
            pass
        self.outcomes = [Outcome.read(self.run_dir(rank) / "outcome-0.json") for rank in range(world_size)]

    def kinds(self) -> set[OutcomeKind]:
        return {outcome.kind for outcome in self.outcomes if outcome is not None}

    def committed(self) -> tuple[int, dict[str, torch.Tensor], Any]:
        """Step, tensors and all else of the newest commit."""
        return newest_commit(self.folder / "checkpoints")

    def exported(self) -> dict[str, torch.Tensor]:
        """The model of the newest commit, as people get it."""
        storage = open_storage(f"file://{self.folder}/checkpoints")
        head = read_head(storage)
        assert head is not None
        assert head.newest is not None
        (path,) = export(storage, head.newest, self.folder / "model.safetensors")
        return load_file(path)

    def run_dir(self, rank: int) -> Path:
        return self.folder / f"run-{self.generation}-{rank}"

    def _settings(
        self, rank: int, environment: dict[str, str], drain_at: int | None, steps: int, echo: bool
    ) -> dict[str, Any]:
        run_dir = self.run_dir(rank)
        run_dir.mkdir(parents=True)
        TrainerConfig(
            job="test",
            generation=self.generation,
            attempt_id=f"attempt{self.generation}",
            seed=5,
            strategy=Strategy(self.strategy),
            precision=Precision(self.precision),
            activation_checkpointing=self.activation_checkpointing,
            deepspeed=self.deepspeed,
            batch=Batch(global_=self.global_batch, micro=3),
            checkpoint=CheckpointConfig(
                uri=f"file://{self.folder}/checkpoints", interval=Interval.parse("1000steps")
            ),
        ).write(run_dir / "run.json")
        return {
            "environment": {**environment, "SPOTTRAIN_RUN_DIR": str(run_dir)},
            "drain_at": drain_at if rank == 0 else None,
            "steps": steps,
            "echo_as": 1000 + self.generation if echo else None,
            "dropout": self.dropout,
            "optimizer": self.optimizer,
            "has_schedule": self.has_schedule,
            "clip_grad_norm": self.clip_grad_norm,
            "deepspeed_config": self.deepspeed_config,
            "cpu_has_fp16": self.cpu_has_fp16,
            "mixed_after": self.mixed_after,
            "export_first": self.export_first,
            "model": self.model and str(self.model),
        }


def assert_succeeded(job: Job) -> None:
    assert job.kinds() == {OutcomeKind.SUCCEEDED}, job.outcomes


def assert_same(job: Job, other: Job, *, exactly: bool = True, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Check that two jobs have committed the same state.

    The step (or its echo), weights, buffers and optimizer state are the same, under the same names.
    """
    (step, tensors, tree), (other_step, other_tensors, other_tree) = job.committed(), other.committed()
    assert step == other_step or step > 1000
    assert tensors.keys() == other_tensors.keys()
    assert tree == other_tree
    for name, value in tensors.items():
        if exactly:
            assert torch.equal(value, other_tensors[name]), name
        else:
            torch.testing.assert_close(value, other_tensors[name], rtol=rtol, atol=atol, check_dtype=False, msg=name)


def stage(number: int, **settings: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig(zero_stage=number, **settings)


@pytest.mark.parametrize(
    ("settings", "precision", "optimizer"),
    [
        pytest.param(stage(0), "fp32", "adamw", id="stage0"),
        pytest.param(stage(1), "bf16", "adamw", id="stage1-bf16"),
        pytest.param(stage(2, offload_optimizer=True), "fp32", "adamw", id="stage2-offload"),
        pytest.param(stage(3), "bf16", "adamw", id="stage3-bf16"),
        pytest.param(stage(3, config=KEPT_BY_NODES), "fp32", "adamw", id="stage3-kept-by-nodes"),
    ],
)
def test_a_resume_at_the_same_world_size_changes_no_bit(
    settings: DeepSpeedConfig, precision: str, optimizer: str, tmp_path: Path, fork: Any
) -> None:
    steady = Job(tmp_path / "steady", fork, deepspeed=settings, precision=precision, optimizer=optimizer, dropout=0.2)
    steady.train(2)
    assert_succeeded(steady)

    drained = replace(steady, folder=tmp_path / "drained", generation=0)
    drained.train(2, drain_at=2)
    assert drained.kinds() == {OutcomeKind.DRAINED}, drained.outcomes
    assert drained.committed()[0] in (2, 3, 4)
    drained.train(2)

    assert_succeeded(drained)
    assert_same(drained, steady)


@pytest.mark.parametrize(
    ("settings", "world_sizes"),
    [
        pytest.param(stage(2), (5, 2), id="stage2"),
        pytest.param(stage(3, config=SMALL_SUB_GROUPS), (1, 5, 2), id="stage3"),
    ],
)
def test_a_checkpoint_is_loaded_and_exported_bit_for_bit_at_any_world_size(
    settings: DeepSpeedConfig, world_sizes: tuple[int, ...], tmp_path: Path, fork: Any
) -> None:
    job = Job(tmp_path, fork, deepspeed=settings, model=tmp_path / "model.pt")
    job.train(3, steps=3)
    assert_succeeded(job)
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    before = job.committed()
    for world_size in world_sizes:
        job.train(world_size, steps=3, echo=True)
        assert_succeeded(job)
        step, tensors, tree = job.committed()
        assert step == 1000 + job.generation
        assert tree == before[2]
        assert all(torch.equal(tensors[name], value) for name, value in before[1].items())
        assert tensors.keys() == before[1].keys()
        (_,) = {path.parent for path in tmp_path.rglob(f"*{FROZEN_SUFFIX}")}  # what isn't trained is written once
        for found in (job.exported(), torch.load(tmp_path / "model.pt.full", weights_only=True)):
            assert found.keys() == model.keys()
            assert all(torch.equal(found[name], value) for name, value in model.items())


@pytest.mark.parametrize(
    ("settings", "optimizer", "recomputed"),
    [
        pytest.param(stage(1), "adamw", False, id="stage1"),
        pytest.param(stage(2), "sgd", True, id="stage2-sgd-recomputed"),
        pytest.param(
            stage(3, offload_parameters=True, offload_optimizer=True),
            "adamw",
            True,
            id="stage3-offload-recomputed",
        ),
    ],
)
def test_it_trains_as_ddp_does_also_when_resized_and_where_ranks_have_no_samples(
    settings: DeepSpeedConfig, optimizer: str, recomputed: bool, tmp_path: Path, fork: Any
) -> None:
    # With SGD what is clipped shows.
    clip_grad_norm = None if optimizer == "sgd" else 1.0
    ddp = Job(
        tmp_path / "ddp", fork, strategy="ddp", optimizer=optimizer, clip_grad_norm=clip_grad_norm, global_batch=7
    )
    ddp.train(1)
    assert_succeeded(ddp)

    zero = replace(ddp, folder=tmp_path / "zero", generation=0, strategy="deepspeed", deepspeed=settings)
    zero.activation_checkpointing = recomputed
    zero.train(3, drain_at=1)  # micro-batches of 2, 2 and 3
    zero.train(2, drain_at=4)  # 3, and 3 and 1
    zero.train(5)  # 1, 1, 2, 1, 2
    assert_succeeded(zero)

    assert_same(zero, ddp, exactly=False)


@pytest.mark.parametrize("number", [0, 1, 3], ids="stage{}".format)
def test_to_export_the_model_before_the_first_step_changes_no_bit(number: int, tmp_path: Path, fork: Any) -> None:
    steady = Job(tmp_path / "steady", fork, deepspeed=stage(number))
    exported = replace(steady, folder=tmp_path / "exported", export_first=True)
    for job in (steady, exported):
        job.train(2, steps=2)
        assert_succeeded(job)
    assert_same(exported, steady)


def test_a_global_batch_below_the_world_size(tmp_path: Path, fork: Any) -> None:
    zero = Job(tmp_path / "zero", fork, deepspeed=stage(3), precision="bf16", global_batch=2)
    zero.train(3)
    assert_succeeded(zero)
    ddp = replace(zero, folder=tmp_path / "ddp", generation=0, strategy="ddp", precision="fp32")
    ddp.train(1)
    wanted, found = ddp.committed()[1], zero.committed()[1]
    weights = [name for name in wanted if name.startswith("model.") and name.endswith("weight")]
    for name in weights:
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name], wanted[name], rtol=0.05, atol=0.02)


def test_a_script_that_torchrun_has_not_started_is_a_world_of_one(tmp_path: Path, fork: Any) -> None:
    job = Job(tmp_path, fork)
    job.train(1, with_torchrun=False)
    assert_succeeded(job)


def test_another_engine_goes_on_from_its_checkpoint(tmp_path: Path, fork: Any) -> None:
    job = Job(tmp_path / "zero", fork, deepspeed=stage(3))
    job.train(2, steps=3)
    job.strategy = "ddp"
    job.train(2)
    assert_succeeded(job)
    progress = Progress.read(job.run_dir(0) / "progress-0.json")
    said = (progress and progress.message) or ""
    assert (
        "The checkpoint at step 3 was made with the strategy deepspeed, and training continues from it with" in said
    )
    ddp = Job(tmp_path / "ddp", fork, strategy="ddp")
    ddp.train(2)
    assert_same(job, ddp, exactly=False)


def test_the_loss_scaler_of_fp16_is_resumed(tmp_path: Path, fork: Any) -> None:
    """It starts so high that the first steps overflow. Adam doesn't count them."""
    power = 20
    scaler = {"fp16": {"initial_scale_power": power, "loss_scale_window": 1000, "hysteresis": 1}}
    steady = Job(tmp_path / "steady", fork, deepspeed=stage(2, config=scaler), precision="fp16")
    steady.cpu_has_fp16 = True
    steady.train(2)
    assert_succeeded(steady)
    drained = replace(steady, folder=tmp_path / "drained", generation=0)
    drained.train(2, drain_at=2)
    skipped = drained.committed()[0]
    drained.train(2)
    assert_succeeded(drained)
    assert_same(drained, steady)
    _, tensors, tree = drained.committed()
    num_skipped = power - math.log2(tree["loss_scaler"]["cur_scale"])
    assert skipped <= num_skipped < STEPS
    assert tree["loss_scaler"]["cur_iter"] == STEPS
    assert {int(value) for name, value in tensors.items() if name.endswith(".step")} == {STEPS - num_skipped}


def test_a_run_that_gains_a_schedule_resumes(tmp_path: Path, fork: Any) -> None:
    job = Job(tmp_path, fork, has_schedule=False)
    job.train(1, steps=2)
    job.has_schedule = True
    job.train(1, steps=4)
    assert_succeeded(job)


def test_fp16_on_a_cpu_that_has_none_is_refused_with_a_sentence(tmp_path: Path, fork: Any) -> None:
    job = Job(tmp_path, fork, precision="fp16", cpu_has_fp16=False)
    job.train(1)
    (outcome,) = job.outcomes
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.INVALID_CONFIGURATION
    assert outcome.failure.message.startswith("precision fp16 needs GPUs: DeepSpeed can't compute in it on this CPU")


@pytest.mark.parametrize("strategy", ["deepspeed", "fsdp"])
@pytest.mark.parametrize(("optimizer", "key"), [("blocks", "largest"), ("blocks in dict", "largest.first")])
def test_an_optimizer_whose_state_cannot_be_cut_is_refused_with_a_sentence(
    optimizer: str, key: str, strategy: str, tmp_path: Path, fork: Any
) -> None:
    job = Job(tmp_path, fork, strategy=strategy, optimizer=optimizer)
    job.train(2, steps=2)
    for outcome in job.outcomes:
        assert outcome is not None
        assert outcome.failure is not None
        assert outcome.failure.message.startswith(f"The optimizer's state {key!r} of shape [")
        assert outcome.failure.message.endswith("; use another optimizer, or the strategy ddp.")


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("adafactor", "The optimizer Adafactor computes with each tensor as a whole, and ZeRO 2 gives it parts"),
        ("frozen group", "The optimizer's parameter group 0 has no parameter that is trained, and ZeRO 2 can't use"),
    ],
)
def test_an_optimizer_that_zero_cannot_use_is_refused_with_a_sentence(
    optimizer: str, said: str, tmp_path: Path, fork: Any
) -> None:
    job = Job(tmp_path, fork, optimizer=optimizer)
    job.train(1)
    (outcome,) = job.outcomes
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.INVALID_CONFIGURATION
    assert outcome.failure.message.startswith(said)


def test_what_contradicts_the_job_is_said_in_a_sentence(tmp_path: Path, fork: Any) -> None:
    job = Job(tmp_path, fork, deepspeed_config={"train_batch_size": 99})
    job.train(1)
    (outcome,) = job.outcomes
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.INVALID_CONFIGURATION
    assert outcome.failure.message == (
        "the DeepSpeed JSON has a train_batch_size that is not the job's batch.global 10; remove it there"
    )


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_ranks_that_use_different_experts_end_the_job_with_a_sentence(
    tmp_path: Path, fork: Any, zero_stage: int
) -> None:
    # Two micro-batches a step: the second of the third step is the first that differs.
    job = Job(tmp_path, fork, deepspeed=stage(zero_stage), global_batch=12, mixed_after=5)
    job.train(2)
    for outcome in job.outcomes:
        assert outcome is not None
        assert outcome.failure is not None
        assert outcome.failure.reason is FailureReason.INVALID_CONFIGURATION
        assert outcome.failure.message.startswith("The ranks used different parameters in a micro-batch")
        assert "rank 0 used experts.0." in outcome.failure.message
        assert "rank 1 used experts.1." in outcome.failure.message


def test_auto_trains_a_small_mixture_whose_ranks_use_different_experts(tmp_path: Path, fork: Any) -> None:
    job = Job(tmp_path, fork, strategy="auto", global_batch=12, mixed_after=0)
    job.train(2, drain_at=2)
    assert job.kinds() == {OutcomeKind.DRAINED}, job.outcomes
    job.train(1)
    assert_succeeded(job)
    progress = Progress.read(job.run_dir(0) / "progress-0.json")
    assert progress is not None
    assert progress.strategy is not None
    assert progress.strategy.strategy == "ddp"
    assert job.committed()[0] == STEPS
