"""What scripts do to their model beside training it.

It changes nothing, or ends with a sentence. Real ranks on gloo show it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments

SCRIPT = Path(__file__).with_name("script_habits.py")
STRATEGIES = ("ddp", "fsdp", "deepspeed")
# How a buffer changes, and what each rank then has.
CHANGES = {
    "order": "rank 0 has a (float32, [4]) where rank 1 has b (float32, [4])",
    "length": "rank 0 has extra (float32, [1]) where rank 1 has extra (float32, [2])",
    "type": "rank 0 has extra (float64, [4]) where rank 1 has extra (float32, [4])",
    "one rank": "rank 0 has no more where rank 1 has late (float32, [2])",
}
ON_TWO_RANKS = (
    *("seeded by rank, ddp", "seeded by rank, fsdp", "hooked, ddp", "hooked, fsdp"),
    *("not evaluated, fsdp", "evaluated, fsdp", "frozen, fsdp", "unfrozen, fsdp", "frozen, ddp", "unfrozen, ddp"),
    *("frozen, deepspeed", "unfrozen, deepspeed", "seeded by rank, rare types, ddp"),
    *("evaluated nowhere, kept", "evaluated before the update, kept", "evaluated after the update, kept"),
    *("in turns, plain", "in turns, ddp", "in turns, fsdp", "in turns, deepspeed", "different models"),
    *("nested backward, ddp", "nested backward, fsdp", "nested backward, deepspeed"),
    *(f"buffers of another {change}, {name}" for change in CHANGES for name in STRATEGIES),
)
TAUGHT_ALIKE = (
    *("taught by the script, zero 2", "taught by deepspeed, zero 3"),
    *("taught by the library, zero 1", "taught by the library, zero 2", "taught by the library, zero 3"),
    "taught by the library, zero 3 with whole parameters",
)
LOST, IN_HALF = "The script changes the parameter teacher.0.weight", "DeepSpeed keeps weights that are not trained in"
TAUGHT_IN_VAIN = {
    "taught by the script, zero 3": LOST,
    "taught by the script, zero 3 with whole parameters": LOST,
    "taught by the library in bf16, zero 1": IN_HALF,
    "taught by the library in bf16, zero 3": IN_HALF,
}
ON_TWO_RANKS = (*ON_TWO_RANKS, *TAUGHT_ALIKE, *TAUGHT_IN_VAIN)
ON_TWO_NODES_OF_TWO = ("seeded by rank, hybrid",)


def run(
    fork: Any, habits: tuple[str, ...], world_size: int, local_world_size: int, folder: Path
) -> list[dict[str, Any]]:
    """What came out of each habit, by rank."""
    result = folder / "result"
    settings = [
        {"environment": environment, "habits": habits, "result": str(result)}
        for environment in rank_environments(world_size, local_world_size=local_world_size)
    ]
    with forked_ranks(fork, SCRIPT, settings):
        pass
    return [json.loads(Path(f"{result}-{rank}").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def two(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(fork, ON_TWO_RANKS, 2, 1, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(fork, ON_TWO_NODES_OF_TWO, 4, 2, tmp_path_factory.mktemp("four"))


def values(ranks: list[dict[str, Any]], habit: str) -> list[list[float]]:
    """Of all ranks, which have the same."""
    for rank in ranks:
        assert "values" in rank[habit], rank[habit]
        assert rank[habit] == ranks[0][habit]
    found: list[list[float]] = ranks[0][habit]["values"]
    return found


@pytest.mark.parametrize("habit", ["seeded by rank, ddp", "seeded by rank, rare types, ddp", "seeded by rank, fsdp"])
def test_ranks_begin_alike_though_a_script_has_seeded_each_differently(habit: str, two: list[dict[str, Any]]) -> None:
    assert values(two, habit)


def test_replicas_of_shards_begin_alike(four: list[dict[str, Any]]) -> None:
    assert values(four, "seeded by rank, hybrid")


def test_hooks_of_the_model_see_only_what_the_script_calls_it_with(two: list[dict[str, Any]]) -> None:
    assert values(two, "hooked, ddp")[0] == pytest.approx(values(two, "hooked, fsdp")[0], rel=1e-5)


def test_ranks_may_evaluate_for_different_times_where_blocks_stay_gathered(two: list[dict[str, Any]]) -> None:
    assert values(two, "evaluated, fsdp") == values(two, "not evaluated, fsdp")


def test_fsdp_follows_what_is_frozen_later(two: list[dict[str, Any]]) -> None:
    before, after = values(two, "frozen, fsdp")
    assert before == after


@pytest.mark.parametrize(
    "habit", ["frozen, ddp", "frozen, deepspeed", "unfrozen, ddp", "unfrozen, fsdp", "unfrozen, deepspeed"]
)
def test_what_would_not_be_trained_as_the_script_means_is_refused(habit: str, two: list[dict[str, Any]]) -> None:
    change = habit.partition(",")[0]
    for rank in two:
        assert (
            rank[habit]
            .get("refused", str(rank[habit]))
            .startswith(f"The parameter blocks.0.weight was {change} after session.prepare")
        )


@pytest.mark.parametrize("when", ["before the update", "after the update"])
def test_an_evaluation_changes_nothing_where_blocks_stay_gathered(when: str, two: list[dict[str, Any]]) -> None:
    assert values(two, f"evaluated {when}, kept") == values(two, "evaluated nowhere, kept")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_networks_that_are_trained_in_turns_are_trained_as_by_a_plain_loop(
    strategy: str, two: list[dict[str, Any]]
) -> None:
    for found, wanted in zip(values(two, f"in turns, {strategy}"), values(two, "in turns, plain"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("habit", TAUGHT_ALIKE)
def test_a_teacher_follows_alike_whoever_lets_it(habit: str, two: list[dict[str, Any]]) -> None:
    for found, wanted in zip(values(two, habit), values(two, "taught by the library, zero 1"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("habit", "sentence"),
    [
        *TAUGHT_IN_VAIN.items(),
        ("in turns, deepspeed", "The parameter maker.0.weight has a gradient in some steps and none in others"),
        *(
            (f"nested backward, {name}", "The parameter blocks.0.bias received a gradient twice")
            for name in STRATEGIES
        ),
        *(
            (f"buffers of another {change}, {name}", f"The ranks have different buffers: {which}.")
            for change, which in CHANGES.items()
            for name in STRATEGIES
        ),
        (
            "different models",
            "the ranks have built different models: rank 0 has offset (float32, [4]) where rank 1 has blocks.2.",
        ),
    ],
)
def test_what_would_be_trained_wrongly_is_refused_on_all_ranks(
    habit: str, sentence: str, two: list[dict[str, Any]]
) -> None:
    for rank in two:
        assert rank[habit].get("refused", str(rank[habit])).startswith(sentence)
