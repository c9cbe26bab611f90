"""`strategy: auto` in a session.

It is chosen from model and machine, recorded in the commits, and kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import spottrain
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.data.batch import BatchPlan
from spottrain.engines.auto import Machine, applied, choose_automatically, facts_of, least_of_all
from spottrain.engines.deepspeed_limits import unfit_for_zero
from spottrain.engines.engine import EngineConfig
from spottrain_api.contract.reports import MemoryEstimate, StrategyChoice
from spottrain_api.settings.choices import Sharding
from spottrain_api.settings.training import DeepSpeedConfig, FsdpConfig
from spottrain_planner.memory_estimate import GIB, ModelFacts

CPU = torch.device("cpu")
GPU = Machine(accelerator_bytes=24 * GIB, host_bytes=256 * GIB, has_deepspeed=True)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(device=CPU, plan=BatchPlan(global_batch=8, micro_batch=1, world_size=2), **settings)


def large_model() -> nn.Module:
    """3.2 billion parameters that take no memory."""
    with torch.device("meta"):
        return nn.ModuleDict(
            {"tokens": nn.Embedding(1000, 4096), "blocks": nn.ModuleList(nn.Linear(4096, 49_000) for _ in range(16))}
        )


def choose(machine: Machine = GPU, **settings: Any) -> StrategyChoice:
    return choose_automatically(large_model(), config(**settings), machine, min_world_size=2, tokens_per_sample=1024)


def test_the_facts_of_a_model_are_seen() -> None:
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(100, 8), "blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))}
    )
    model.get_submodule("blocks.0").requires_grad_(False)
    assert facts_of(model) == ModelFacts(
        num_parameters=1016,
        num_trained=944,
        hidden=8,
        layers=3,
        vocabulary=100,
        built_bytes=4 * 1016,
        frozen_bytes=4 * 72,
    )
    trained = ModelFacts(num_parameters=6, num_trained=6, built_bytes=2 * 6, frozen_bytes=0)
    assert facts_of(nn.Linear(2, 2).bfloat16()) == trained


def test_the_choice_follows_from_the_machine_and_is_applied() -> None:
    offloaded = choose()
    assert (offloaded.strategy, offloaded.zero_stage) == ("deepspeed", 2), offloaded.reason
    assert applied(offloaded, config()).deepspeed == DeepSpeedConfig(zero_stage=2, offload_optimizer=True)
    assert offloaded.memory.available == 24 * GIB
    assert offloaded.reason.startswith("3.2")

    without = choose(Machine(accelerator_bytes=24 * GIB, host_bytes=256 * GIB, has_deepspeed=False))
    assert (without.strategy, without.offload_parameters) == ("fsdp", True)
    assert applied(without, config()).fsdp.offload

    roomy = choose(Machine(accelerator_bytes=80 * GIB, host_bytes=256 * GIB, has_deepspeed=False))
    assert (roomy.strategy, applied(roomy, config())) == ("ddp", config())

    on_the_cpu = choose(Machine(accelerator_bytes=None, host_bytes=24 * GIB, has_deepspeed=True))
    assert not on_the_cpu.offload_optimizer


def test_the_micro_batches_of_the_smallest_world_count() -> None:
    def gradients(min_world_size: int) -> int:
        plan = BatchPlan(global_batch=8, micro_batch=4, world_size=2)
        settings = replace(config(fsdp=FsdpConfig(sharding=Sharding.HYBRID, offload=True)), plan=plan)
        machine = Machine(accelerator_bytes=24 * GIB, host_bytes=256 * GIB, has_deepspeed=False)
        choice = choose_automatically(
            large_model(), settings, machine, min_world_size=min_world_size, tokens_per_sample=16
        )
        assert choice.offload_parameters, choice.reason
        return choice.memory.gradients

    assert gradients(2) == 0
    assert gradients(1) == 4 * facts_of(large_model()).num_parameters


def test_a_zero_stage_that_the_job_names_is_kept_to() -> None:
    assert choose(deepspeed=DeepSpeedConfig(zero_stage=3)).zero_stage == 3
    by_json = DeepSpeedConfig(config={"zero_optimization": {"stage": 3}})
    assert choose(deepspeed=by_json).zero_stage == 3
    assert choose(deepspeed_config={"zero_optimization": {"stage": 3}}).zero_stage == 3


def test_zero_is_passed_over_for_a_model_that_it_cannot_train() -> None:
    model = large_model()
    model.get_submodule("blocks.0").bias = nn.Parameter(torch.empty(49_000, dtype=torch.float64, device="meta"))
    choice = choose_automatically(model, config(), GPU, min_world_size=2, tokens_per_sample=1024)
    assert (choice.strategy, choice.offload_parameters) == ("fsdp", True), choice.reason
    bf16 = config(precision=torch.bfloat16)
    choice = choose_automatically(model, bf16, GPU, min_world_size=2, tokens_per_sample=1024)
    assert choice.strategy == "deepspeed", choice.reason


def test_the_sizes_of_a_deepspeed_json_count() -> None:
    def working(zero: dict[str, Any]) -> int:
        return choose(deepspeed_config={"zero_optimization": {"stage": 3, **zero}}).memory.working

    usual = working({})
    assert working({"reduce_bucket_size": 4e8}) == usual - 1e8 * 4 * 2
    assert working({"reduce_bucket_size": 4e8, "stage3_max_live_parameters": 7e8}) == usual - 1e8 * 4 * 2 - 3e8 * 4
    assert working({"reduce_bucket_size": "auto", "allgather_bucket_size": 2e8}) == usual
    with pytest.raises(ValueError, match="has reduce_bucket_size true; write a number of elements"):
        working({"reduce_bucket_size": True})


def test_parameters_that_fsdp_keeps_gathered_count() -> None:
    def working(reshard_after_forward: bool) -> int:
        machine = Machine(accelerator_bytes=48 * GIB, host_bytes=256 * GIB, has_deepspeed=False)
        choice = choose(machine, fsdp=FsdpConfig(reshard_after_forward=reshard_after_forward))
        assert choice.strategy == "fsdp", choice.reason
        return choice.memory.working

    assert working(False) > 4 * facts_of(large_model()).num_parameters > working(True)


def typed(*dtypes: torch.dtype) -> nn.Module:
    return nn.ParameterList(torch.ones(2, dtype=dtype) for dtype in dtypes)


@pytest.mark.parametrize(
    ("model", "stage", "precision", "said"),
    [
        (typed(torch.float32), 3, torch.float32, None),
        (typed(torch.float32, torch.bfloat16), 0, torch.float32, None),
        (typed(torch.float32, torch.bfloat16), 1, torch.float32, "of several types (0 of torch.float32 and 1 of"),
        (typed(torch.float32, torch.bfloat16), 1, torch.bfloat16, None),
        (typed(torch.float64), 0, torch.float32, "The parameter 0 is of torch.float64"),
        (typed(torch.float32, torch.complex64), 2, torch.bfloat16, "The parameter 1 is of torch.complex64"),
        (nn.ParameterList([torch.ones(2), torch.ones(0)]), 2, torch.float32, None),
        (nn.ParameterList([torch.ones(2), torch.ones(0)]), 3, torch.float32, "The parameter 1 has no elements"),
    ],
)
def test_what_zero_cannot_train_is_known(
    model: nn.Module, stage: int, precision: torch.dtype, said: str | None
) -> None:
    refusal = unfit_for_zero(model, stage, precision)
    assert refusal is None if said is None else said in (refusal or "")


def test_a_world_of_one_is_its_own_least() -> None:
    assert least_of_all(GPU, None) == GPU
    own = Machine.of(CPU, 1)
    assert own.accelerator_bytes is None
    assert own.host_bytes > 0


def train(uri: str, steps: int) -> StrategyChoice | None:
    with spottrain.session(strategy="auto", global_batch=4, micro_batch=2, checkpoint_uri=uri) as session:
        training = session.prepare(
            nn.Linear(4, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=[torch.ones(4)] * 8,
        )
        for step in training.steps(total=steps):
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            step.update()
        return session._context.reporter.progress.strategy


@pytest.fixture
def uri(tmp_path: Path) -> Any:
    yield f"file://{tmp_path}"
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_run_keeps_to_what_its_commits_say(uri: str) -> None:
    first = train(uri, 2)
    assert first is not None
    assert first.strategy == "ddp"

    # The same state with another choice, as from a job that began on other machines.
    storage = open_storage(uri)
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    saver = Checkpointer(storage, generation=head.fence, attempt_id="x", rank=0, world_size=1)
    state: dict[str, Any] = {"model": {"weight": torch.ones(1, 4), "bias": torch.ones(1)}, "optimizer": {}}
    loaded = saver.load(lambda _: state, head.newest)
    assert loaded.extra["strategy"] == first.model_dump()
    nothing = MemoryEstimate(**dict.fromkeys(MemoryEstimate.model_fields, 0))
    recorded = StrategyChoice(strategy="fsdp", name="fsdp", reason="It was small.", memory=nothing)
    saver.save(state, step=3, extra={**loaded.extra, "strategy": recorded.model_dump()})

    assert train(uri, 4) == recorded


def test_a_damaged_commit_is_passed_over_for_the_one_before_it(uri: str, tmp_path: Path) -> None:
    saver = Checkpointer(open_storage(uri), generation=1, attempt_id="x", rank=0, world_size=1)
    for step in (1, 2):
        saver.save({}, step=step, extra={"strategy": step})
    newest = saver.latest()
    assert newest is not None
    assert saver.newest_extra() == {"strategy": 2}
    (tmp_path / newest.manifest).write_text("{}")
    assert saver.newest_extra() == {"strategy": 1}


def test_without_commits_there_is_nothing_recorded(uri: str) -> None:
    assert Checkpointer(open_storage(uri), generation=1, attempt_id="x", rank=0, world_size=1).newest_extra() == {}
