"""Estimates of memory, and the strategy that they speak for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_planner.memory_estimate import GIB, Estimate, ModelFacts, Workload, estimates, in_gib
from spottrain_planner.strategy_choice import Choice, Memory, choose_strategy, host_needed, in_pieces

A100 = Memory(accelerator_bytes=80 * GIB)
SMALL = Memory(accelerator_bytes=24 * GIB)


def workload(billions: float, *, world_size: int = 8, **other: int | str | bool | None) -> Workload:
    known = {"micro_batch": 4, "sequence_length": 2048, **other}
    model = ModelFacts(num_parameters=int(billions * 1e9))
    return Workload(model=model, world_size=world_size, **known)  # type: ignore[arg-type]


def without_deepspeed(given: Workload, memory: Memory) -> Choice:
    return choose_strategy(given, memory, allowed=lambda estimate: estimate.strategy != "deepspeed")


def by_name(given: Workload) -> dict[str, Estimate]:
    return {estimate.name: estimate for estimate in estimates(given)}


def test_ddp_holds_sixteen_bytes_a_parameter_and_sharding_divides_them() -> None:
    table = by_name(workload(1.0, world_size=4))
    ddp, fsdp = table["ddp"], table["fsdp"]
    assert ddp.parameters + ddp.gradients + ddp.optimizer == 16 * 10**9
    assert fsdp.parameters + fsdp.gradients + fsdp.optimizer == 4 * 10**9
    zero = table["deepspeed ZeRO 3"]
    assert (zero.parameters, zero.gradients, zero.optimizer) == (0.5e9, 1e9, 3e9)
    offloaded = table["deepspeed ZeRO 3, optimizer and parameters on the CPU"]
    assert (offloaded.staging, offloaded.host) == (3e9, 4.5e9 + 3e9)
    assert offloaded.parameters + offloaded.gradients + offloaded.optimizer == 0


OFFLOADED = "fsdp, optimizer and parameters on the CPU"


def test_offload_leaves_gradients_on_the_device_until_replicas_reduce_them() -> None:
    """Four ranks each have a shard, and two micro-batches of the 64 samples."""
    several = by_name(workload(1.0, fsdp_ranks=4, global_batch=64))
    assert several[OFFLOADED].gradients == several["fsdp"].gradients == 10**9
    assert (several[OFFLOADED].parameters, several[OFFLOADED].optimizer) == (0, 0)
    one = by_name(workload(1.0, fsdp_ranks=4, global_batch=32))
    assert several[OFFLOADED].step - one[OFFLOADED].step == 10**9
    assert several[OFFLOADED].host == one[OFFLOADED].host
    assert by_name(workload(1.0, global_batch=64))[OFFLOADED].gradients == 0


@pytest.mark.parametrize("world_size", [1, 8])
def test_parameters_that_fsdp_keeps_gathered_count_whole(world_size: int) -> None:
    """Otherwise there are two blocks of them, or one if there is nothing to gather."""
    usual = workload(1.0, world_size=world_size)
    kept = replace(usual, fsdp_keeps_gathered=True)
    _, layers = usual.model.proportions()
    block = usual.model.num_parameters // layers
    for name in ("fsdp", OFFLOADED):
        more = by_name(kept)[name].buffers - by_name(usual)[name].buffers
        assert more == usual.compute_bytes * (usual.model.num_parameters - block * min(world_size, 2))


def test_activations_grow_with_tokens_and_shrink_when_they_are_computed_again() -> None:
    usual = by_name(workload(7.0))["fsdp"].activations
    assert by_name(workload(7.0, micro_batch=8))["fsdp"].activations == pytest.approx(2 * usual)
    # 7 billion parameters have about 32 layers of 4096: 34 bytes * 8192 tokens * 32 * 4096.
    assert usual == pytest.approx(34 * 8192 * 32 * 4096, rel=0.3)
    assert by_name(workload(7.0, activation_checkpointing=True))["fsdp"].activations < usual / 8
    assert by_name(workload(7.0, sequence_length=None))["fsdp"].activations == 0


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state() -> None:
    lora = Workload(model=ModelFacts(num_parameters=10**9, num_trained=10**6), micro_batch=1, world_size=2)
    for estimate in estimates(lora):
        assert estimate.gradients + estimate.optimizer <= 16 * 10**6
    assert by_name(lora)["ddp"].parameters == 4 * 10**9


def test_frozen_parameters_keep_their_size() -> None:
    """As where 4-bit weights are packed in half as many bytes."""
    packed = ModelFacts(num_parameters=10**9, num_trained=10**6, frozen_bytes=10**9)
    table = by_name(Workload(model=packed, micro_batch=1, world_size=2))
    assert table["ddp"].parameters == 10**9 + 4 * 10**6
    assert table["fsdp"].parameters == (10**9 + 4 * 10**6) / 2


def test_the_logits_of_a_large_vocabulary_count() -> None:
    words = ModelFacts(num_parameters=124_000_000, hidden=768, layers=12, vocabulary=50_257)
    plain = ModelFacts(num_parameters=124_000_000, hidden=768, layers=12)
    many, none = (
        estimates(Workload(model=model, micro_batch=8, world_size=1, sequence_length=1024))[0].activations
        for model in (words, plain)
    )
    assert many - none == 8 * 1024 * 50_257 * 12


@pytest.mark.parametrize(
    ("given", "memory", "wanted"),
    [
        pytest.param(workload(0.1), SMALL, ("ddp", None, False), id="small"),
        pytest.param(workload(7.0, micro_batch=1), A100, ("fsdp", None, False), id="needs shards"),
        pytest.param(workload(7.0, world_size=1, micro_batch=1), A100, ("deepspeed", 2, True), id="one rank"),
        pytest.param(
            workload(13.0, world_size=2, micro_batch=1, activation_checkpointing=True),
            Memory(accelerator_bytes=48 * GIB),
            ("deepspeed", 2, True),
            id="optimizer to the CPU",
        ),
        pytest.param(
            workload(30.0, world_size=4, micro_batch=1, activation_checkpointing=True),
            Memory(accelerator_bytes=32 * GIB),
            ("deepspeed", 3, True),
            id="parameters in shards, optimizer to the CPU",
        ),
    ],
)
def test_the_first_that_fits_is_chosen(given: Workload, memory: Memory, wanted: tuple[str, int | None, bool]) -> None:
    choice = choose_strategy(given, memory)
    chosen = choice.estimate
    assert choice.fits
    assert (chosen.strategy, chosen.zero_stage, chosen.offload_optimizer) == wanted, choice.reason


def test_without_deepspeed_fsdp_keeps_on_the_cpu_what_does_not_fit() -> None:
    choice = without_deepspeed(workload(13.0, world_size=1, micro_batch=1), SMALL)
    assert (choice.fits, choice.estimate.name) == (True, "fsdp, optimizer and parameters on the CPU")


def test_the_reason_names_the_figures() -> None:
    choice = choose_strategy(workload(7.0, micro_batch=1), A100)
    assert choice.reason.startswith("7 billion parameters on 8 ranks need about ")
    assert "with fsdp, of 73.6 GiB of an accelerator's 80.0 GiB; ddp would need 1" in choice.reason


def test_where_nothing_fits_it_says_what_to_change() -> None:
    choice = choose_strategy(workload(70.0, world_size=2), Memory(accelerator_bytes=24 * GIB, offloads=False))
    assert not choice.fits
    assert choice.reason.startswith("Nothing fits: 70 billion parameters on 2 ranks need at least ")
    assert choice.remedy == "Raise nodes.min, or use accelerators with more memory."
    many_tokens = choose_strategy(workload(1.0, micro_batch=256), SMALL)
    assert "Activations take most of it: lower batch.micro, set activationCheckpointing" in many_tokens.remedy


def test_offload_needs_room_on_the_host_and_a_host_apart() -> None:
    given = workload(7.0, world_size=1, micro_batch=1)
    assert choose_strategy(given, Memory(accelerator_bytes=80 * GIB, host_bytes=200 * GIB)).fits
    small_host = choose_strategy(given, Memory(accelerator_bytes=80 * GIB, host_bytes=50 * GIB))
    assert not small_host.fits
    assert "leave 104.4 GiB each on the CPU, with deepspeed ZeRO 2, optimizer on the CPU" in small_host.reason
    assert small_host.reason.endswith("memory is 50.0 GiB.")
    assert small_host.remedy == "Raise nodes.min, or use nodes with more memory."
    on_the_cpu = choose_strategy(given, Memory(accelerator_bytes=80 * GIB, offloads=False))
    assert not on_the_cpu.estimate.offload_optimizer
    assert "a rank's share of the node's 80.0 GiB" in on_the_cpu.reason


def test_what_a_rank_builds_has_to_fit_the_host() -> None:
    given = workload(70.0, world_size=64, micro_batch=1, activation_checkpointing=True)
    roomy = choose_strategy(given, Memory(accelerator_bytes=80 * GIB, host_bytes=300 * GIB))
    assert (roomy.fits, roomy.estimate.name, roomy.estimate.host) == (True, "fsdp", 280e9)
    assert roomy.reason.endswith("Each rank builds the whole model on the CPU first: 260.8 GiB.")
    small = choose_strategy(given, Memory(accelerator_bytes=80 * GIB, host_bytes=250 * GIB))
    assert (small.fits, small.estimate.name) == (False, "fsdp")
    assert small.reason == (
        "Nothing fits: before it is spread, each rank builds the whole model on the CPU, 70 billion parameters in "
        "260.8 GiB, and a rank's share of the node's memory is 250.0 GiB."
    )
    assert small.remedy == "Lower processesPerNode, or use nodes with more memory."


def test_a_checkpoint_is_staged_on_the_host() -> None:
    """A node with less memory than its GPUs, such as one with 24 GiB of GPU and 16 GiB of memory."""
    given = workload(1.0, world_size=1, micro_batch=1, sequence_length=16)
    roomy = choose_strategy(given, Memory(accelerator_bytes=24 * GIB, host_bytes=12 * GIB))
    assert (roomy.fits, roomy.estimate.name, roomy.estimate.host) == (True, "ddp", 12e9)
    assert roomy.reason.endswith("Each rank stages its share of a checkpoint on the CPU: 11.2 GiB.")
    small = Memory(accelerator_bytes=24 * GIB, host_bytes=11 * GIB)
    pieces = choose_strategy(given, small)
    assert (pieces.fits, pieces.estimate.name) == (True, "ddp")
    assert pieces.reason.endswith(
        "A rank's share of a checkpoint, 11.2 GiB, doesn't fit into its share of the node's memory. So it is staged "
        "in pieces of 128 MiB, and training waits for the upload of each checkpoint."
    )
    assert host_needed(pieces.estimate, given, small) == 4e9  # as the model is built


def test_pieces_of_a_checkpoint_need_room_beside_what_is_offloaded() -> None:
    given = workload(7.0, world_size=1, micro_batch=1)
    for spare, does_fit in ((1.0, True), (-0.1, False)):
        offloaded = by_name(given)["deepspeed ZeRO 2, optimizer on the CPU"].offloaded
        share = int(offloaded + (128 << 20) + spare * GIB)
        choice = choose_strategy(given, Memory(accelerator_bytes=80 * GIB, host_bytes=share))
        assert (choice.fits, choice.estimate.offloaded) == (does_fit, offloaded)


def test_ranks_that_compute_on_the_cpu_stage_in_the_same_memory() -> None:
    given = workload(1.0, world_size=1, micro_batch=1, sequence_length=16, precision="fp32", built_in_place=True)
    ddp = by_name(given)["ddp"]
    for needed, does_fit, is_in_pieces in (
        (ddp.total + ddp.staging + GIB, True, False),
        (ddp.total + ddp.staging - GIB, True, True),
        (ddp.total + GIB, True, True),
        (ddp.total, False, True),
    ):
        share = int(needed / 0.92)
        memory = Memory(accelerator_bytes=share, host_bytes=share, offloads=False)
        choice = without_deepspeed(given, memory)
        assert (choice.fits, in_pieces(choice.estimate, given, memory)) == (does_fit, is_in_pieces)
        assert ("staged in pieces" in choice.reason) == (does_fit and is_in_pieces)


def test_the_peak_may_be_at_the_start() -> None:
    """64 ranks that compute on the CPU build all of the parameters.

    They keep 16 bytes for each of 1/64 of them.
    """
    given = workload(7.0, world_size=64, micro_batch=1, sequence_length=16, built_in_place=True)
    fsdp = by_name(given)["fsdp"]
    assert fsdp.start > 4 * 7e9 > 4 * fsdp.step
    assert (fsdp.total - 1.5 * GIB, fsdp.host) == (fsdp.start, fsdp.staging)
    for share, does_fit in ((24, False), (40, True)):
        choice = choose_strategy(given, Memory(accelerator_bytes=share * GIB, host_bytes=share * GIB, offloads=False))
        assert choice.fits is does_fit
        assert " GiB each while the model is spread" in choice.reason


def test_sharding_needs_the_largest_piece_as_a_whole_at_the_start() -> None:
    model = ModelFacts(num_parameters=10**9, hidden=1000, layers=50, vocabulary=100_000)
    fsdp = estimates(Workload(model=model, micro_batch=1, world_size=1000, sequence_length=1))[1]
    assert fsdp.start == 4 * 10**6 + 4 * 2 * 1000 * 100_000
    assert fsdp.total == fsdp.start + 1.5 * GIB


def test_without_a_sequence_length_room_is_left_for_activations() -> None:
    choice = choose_strategy(workload(1.0, sequence_length=None), SMALL)
    assert "the rest is left to activations" in choice.reason


@given(st.integers(10**6, 10**12), st.integers(1, 64), st.sampled_from(["fp32", "bf16"]))
def test_more_ranks_and_more_sharding_never_need_more(num: int, world_size: int, precision: str) -> None:
    model = ModelFacts(num_parameters=num)
    few = estimates(Workload(model=model, micro_batch=1, world_size=world_size, precision=precision))
    many = estimates(Workload(model=model, micro_batch=1, world_size=world_size + 1, precision=precision))
    for before, after in zip(few, many, strict=True):
        kept = before.parameters + before.gradients + before.optimizer + before.host
        assert after.parameters + after.gradients + after.optimizer + after.host <= kept
    stages = [e.parameters + e.gradients + e.optimizer for e in few if e.strategy == "deepspeed"][:3]
    assert stages == sorted(stages, reverse=True)


@pytest.mark.parametrize("wrong", [{"precision": "fp8"}, {"micro_batch": 0}, {"sequence_length": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fp8|at least 1"):
        workload(1.0, **wrong)


def test_proportions_are_kept_where_they_are_known() -> None:
    assert ModelFacts(num_parameters=7 * 10**9, hidden=4096, layers=32).proportions() == (4096, 32)
    assert ModelFacts(num_parameters=12 * 32 * 4096**2, layers=32).proportions() == (4096, 32)
    assert ModelFacts(num_parameters=12 * 32 * 4096**2, hidden=4096).proportions() == (4096, 32)
    assert ModelFacts(num_parameters=1).proportions() == (2, 1)


@pytest.mark.parametrize(("num_bytes", "text"), [(80 * GIB, "80.0 GiB"), (1 << 20, "1 MiB"), (0, "0 MiB")])
def test_sizes_are_said_as_people_do(num_bytes: int, text: str) -> None:
    assert in_gib(num_bytes) == text
