"""Loops of other frameworks on real ranks, drained and resized.

The run is the same as in spottrain's own loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spottrain.checkpoint.loading.export import export
from spottrain.data.audit import read_audit
from spottrain_api.contract.reports import FailureReason, OutcomeKind
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import StabilityConfig
from trainer_runs import STEPS, Run, assert_drained, assert_succeeded

SCRIPT = Path(__file__).with_name("adapter_script.py")
LOOPS = [
    "transformers",
    "transformers-counting",
    "transformers-ignoring",
    "transformers-own-loss",
    "lightning",
    "accelerate",
]

SKIP = StabilityConfig(non_finite=StabilityAction.SKIP)

pytestmark = pytest.mark.timeout(600)


def run_of(loop: str, folder: Path, fork: Any, **more: Any) -> Run:
    # Ten samples don't divide by three ranks, and with micro-batches of three two of these have an empty one.
    return Run(folder, fork, script=SCRIPT, strategy="auto", global_batch=10, settings={"loop": loop}, **more)


INSTEAD = {
    "transformers": "activationCheckpointing (gradient_checkpointing in TrainingArguments)",
    "lightning": "activationCheckpointing (torch.utils.checkpoint in the module)",
    "accelerate": "activationCheckpointing (torch.utils.checkpoint in the model)",
}
each_framework = pytest.mark.parametrize("loop", INSTEAD)


@pytest.fixture(scope="module")
def own_loop(tmp_path_factory: pytest.TempPathFactory, fork: Any) -> Callable[[str], Run]:
    """What spottrain's own loop trains, without interruption: as the loop of a framework, the Trainer's by epoch."""

    @cache
    def trained(loop: str) -> Run:
        run = run_of(loop, tmp_path_factory.mktemp("own"), fork)
        run.generate(2)
        assert_succeeded(run)
        return run

    return lambda loop: trained("none-by-epoch" if loop.startswith("transformers") else "none")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_framework_is_drained_resized_and_trains_what_the_own_loop_trains(
    loop: str, own_loop: Callable[[str], Run], tmp_path: Path, fork: Any
) -> None:
    run = run_of(loop, tmp_path, fork)
    run.generate(2, {1: {3: "drain"}})
    assert 3 <= assert_drained(run) <= 5
    run.generate(3, {2: {3: "sigterm"}})
    assert_drained(run)
    run.generate(1)
    assert_succeeded(run)

    wanted = own_loop(loop).parameters()
    for name, value in run.parameters().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
    audit = read_audit(tmp_path / "audit")
    assert audit.problems(STEPS) == []
    assert audit.num_redone == 0
    assert {step.world for step in audit.steps} == {1, 2, 3}
    assert run.progress().loss == pytest.approx(own_loop(loop).progress().loss, rel=1e-3)

    run.generate(1)  # nothing is left to do, and nothing is done again

    assert_succeeded(run)
    assert read_audit(tmp_path / "audit").num_redone == 0


def test_ddp_with_a_static_graph_trains_what_the_own_loop_trains(
    own_loop: Callable[[str], Run], tmp_path: Path, fork: Any
) -> None:
    whole = {"batch": {"global": 10, "micro": 10}}  # torch fails if gradients of a static graph are accumulated
    run = run_of("accelerate-static", tmp_path, fork, spec=whole)
    run.generate(2, {1: {3: "drain"}})
    assert_drained(run)
    run.generate(2)
    assert_succeeded(run)

    wanted = own_loop("accelerate").parameters()
    for name, value in run.parameters().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loop", ["transformers", "lightning"])
def test_a_finished_run_trains_on_with_a_larger_total(loop: str, tmp_path: Path, fork: Any) -> None:
    run = run_of(loop, tmp_path, fork)
    for steps in (4, 6):
        run.generate(1, steps=steps)
        assert_succeeded(run)
        assert [outcome and outcome.step for outcome in run.outcomes] == [steps]
    assert read_audit(tmp_path / "audit").problems(6) == []


@each_framework
def test_a_framework_resumed_at_the_same_world_size_differs_in_no_bit(loop: str, tmp_path: Path, fork: Any) -> None:
    """A drained and resumed run has bit for bit the weights of a steady one.

    It has them although one step is left out because a loss was not finite on one rank, the evaluation at the drain
    is put off, another notice comes in an evaluation that takes long, and not all parameters are used. Both runs end
    when the evaluations, or an object of the script's own, say so.
    """
    more: dict[str, Any] = {"dropout": 0.2, "stability": SKIP, "environment": {"EVALUATES": "yes", "IS_ODD": "yes"}}
    steady = run_of(loop, tmp_path / "steady", fork, **more)
    steady.generate(2, {1: {3: "nan"}})
    assert_succeeded(steady)

    run = run_of(loop, tmp_path / "drained", fork, **more)
    run.generate(2, {0: {6: "drain"}, 1: {3: "nan"}})
    assert 6 <= assert_drained(run) < 10
    run.settings["commits_at_once"] = True
    run.generate(2, {0: {"10+": "await"}, 1: {"10+": "notice"}})
    assert assert_drained(run) == 10
    run.generate(2)
    assert_succeeded(run)

    run.generate(1)  # nothing is left to do
    assert_succeeded(run)

    wanted = steady.parameters()
    assert wanted.keys() == run.parameters().keys()
    assert [float(wanted[name]) != 0 for name in sorted(wanted) if "spare" in name] == [True, False]
    assert {outcome and outcome.step for outcome in (*steady.outcomes, *run.outcomes)} == {12}
    assert run.progress().skipped_steps == 1
    assert all(torch.equal(value, wanted[name]) for name, value in run.parameters().items())


def test_the_trainer_evaluates_once_at_the_end_of_an_epoch(tmp_path: Path, fork: Any) -> None:
    """The Trainer evaluates once, even if a drain puts the evaluation off, and at the end of the run."""
    run = run_of("transformers", tmp_path, fork, environment={"BY_EPOCHS": "yes"})
    run.generate(2, {0: {4: "drain"}})
    assert assert_drained(run) == 5
    run.generate(1)
    assert_succeeded(run)
    run.generate(1)  # nothing is left to do
    assert_succeeded(run)


def test_the_adapters_of_a_peft_model_are_exported_as_peft_saves_them(tmp_path: Path, fork: Any) -> None:
    run = run_of("transformers-peft", tmp_path, fork)
    run.generate(2, {0: {6: "drain"}})
    assert_drained(run)
    run.generate(2)
    assert_succeeded(run)

    head, exported, wanted = run.head(), tmp_path / "exported", tmp_path / "adapters"
    assert head is not None
    assert head.newest is not None
    written = {path.relative_to(exported) for path in export(run.storage(), head.newest, exported)}

    of_each = {Path("adapter_model.safetensors"), Path("adapter_config.json")}
    assert written == of_each | {"other" / path for path in of_each}
    for folder in (".", "other"):
        config = "adapter_config.json"
        assert json.loads((exported / folder / config).read_text()) == json.loads(
            (wanted / folder / config).read_text()
        )
        theirs = load_file(wanted / folder / "adapter_model.safetensors")
        ours = load_file(exported / folder / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@each_framework
def test_what_a_framework_decides_itself_is_refused_in_the_job(loop: str, tmp_path: Path, fork: Any) -> None:
    run = run_of(loop, tmp_path, fork, spec={"activationCheckpointing": True})
    [outcome] = run.generate(1)
    assert outcome is not None
    assert (outcome.kind, outcome.step) == (OutcomeKind.FAILED, 0)
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.INVALID_CONFIGURATION
    assert INSTEAD[loop] in outcome.failure.message


@pytest.mark.parametrize(
    ("loop", "misuse", "sentence"),
    [
        ("transformers", "order", "for train_sampling_strategy one of random, sequential, group_by_length"),
        ("transformers", "sampler", "RepeatingTrainer brings an order of samples of its own (_get_train_sampler)"),
        ("transformers", "drop last", "dataloader_drop_last, data_seed of TrainingArguments can't be followed"),
        ("transformers", "loader", "dataset is a DataLoader"),
        ("lightning", "manual", "spottrain's strategy for Lightning needs max_epochs for a module with manual"),
        ("lightning", "data", "a loss was computed for data that are not the job's"),
        ("lightning", "averages", "replaces the weights in training"),
        ("lightning", "pickle", "at 'lightning.checkpoint.num_batches' is a builtins.object, which can't be stored"),
        ("accelerate", "models", "the accelerator has prepared another model beside"),
        ("accelerate", "weight", "0 of the 4 micro-batches of step 1 had been weighed"),
        ("accelerate", "accumulation", "1 of the 4 micro-batches of step 1 had been weighed"),
    ],
)
def test_what_would_be_another_run_at_another_world_size_is_refused(
    loop: str, misuse: str, sentence: str, tmp_path: Path, fork: Any
) -> None:
    [outcome] = run_of(loop, tmp_path, fork, environment={"MISUSE": misuse}).generate(1)
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.INVALID_CONFIGURATION
    assert sentence in outcome.failure.message


@each_framework
def test_what_is_set_in_the_framework_instead_makes_no_other_commits(
    loop: str, own_loop: Callable[[str], Run], tmp_path: Path, fork: Any
) -> None:
    """A framework's own settings don't change the commits.

    The run sets precision, activations that are recomputed and, except in Lightning, compilation. Then it turns all
    of them off.
    """
    run = run_of(loop, tmp_path, fork, environment={"ALL_ON": "yes"})
    run.generate(2, {1: {3: "drain"}})
    assert 3 <= assert_drained(run) <= 5
    run.environment.clear()
    run.generate(1)
    assert_succeeded(run)
    assert read_audit(tmp_path / "audit").num_redone == 0
    in_fp32, in_both = own_loop(loop).parameters(), run.parameters()
    for name, value in in_both.items():
        torch.testing.assert_close(value, in_fp32[name], rtol=0.05, atol=0.02)
    assert any(not torch.equal(value, in_fp32[name]) for name, value in in_both.items())
