"""The optimizer of a run after a resume: its options, groups and states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from commits import newest_commit
from one_rank_runs import STEPS, train
from optimizer_kinds import Int8
from spottrain.checkpoint.errors import UnsupportedState
from spottrain.engines.optimizer_state import NamedOptimizer
from spottrain.schedules import warmup_cosine

pytestmark = pytest.mark.usefixtures("world_of_its_own")


def with_options(weights: Iterator[nn.Parameter], rate: float, decay: float) -> Optimizer:
    return torch.optim.AdamW(weights, lr=rate, weight_decay=decay)


def with_own_decay(weights: Iterator[nn.Parameter]) -> Optimizer:
    """As docs/how-to/resume-fork-export.md has it."""
    optimizer = with_options(weights, 0.25, 0.5)

    def keep_own(loaded: Optimizer) -> None:
        for group in loaded.param_groups:
            group["weight_decay"] = 0.5

    optimizer.register_load_state_dict_post_hook(keep_own)
    return optimizer


@pytest.mark.parametrize(
    ("schedule", "make", "said"),
    [
        pytest.param(
            warmup_cosine(total=STEPS),
            lambda weights: with_options(weights, 0.125, 0.5),
            "lr 0.25 (in the script: 0.125), weight_decay 0.25 (in the script: 0.5)",
            id="schedule",
        ),
        pytest.param(
            None, lambda weights: with_options(weights, 0.125, 0.25), "lr 0.25 (in the script: 0.125)", id="constant"
        ),
        pytest.param(warmup_cosine(total=STEPS), lambda weights: with_options(weights, 0.25, 0.25), None, id="same"),
        pytest.param(None, with_own_decay, None, id="kept"),
    ],
)
def test_options_of_the_optimizer_that_a_commit_replaces_are_named(
    schedule: Callable[[Optimizer], LRScheduler] | None,
    make: Callable[[Iterator[nn.Parameter]], Optimizer],
    said: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(f"file://{tmp_path}", schedule, STEPS // 2, make=lambda weights: with_options(weights, 0.25, 0.25))
    caplog.clear()
    train(f"file://{tmp_path}", schedule, STEPS, make=make)
    found = [record.getMessage() for record in caplog.records if "options of the checkpoint" in record.getMessage()]
    assert len(found) == (said is not None)
    assert said is None or f"at step {STEPS // 2}, which differ from the script's: {said}. " in found[0]


def test_options_that_a_commit_replaces_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = []
    for last, rate in ((2, 0.25), (3, 0.125), (4, 0.125), (5, 0.0625)):
        caplog.clear()
        train(f"file://{tmp_path}", None, last, make=functools.partial(with_options, rate=rate, decay=0.0))
        said.append([number for number in ("0.125", "0.0625") if f"lr 0.25 (in the script: {number})" in caplog.text])
    assert said == [[], ["0.125"], [], ["0.0625"]]


def test_options_that_the_script_sets_in_each_step_are_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As nanoGPT's train.py sets its rate, also with another one after a resume."""

    def make(weights: Iterator[nn.Parameter], rate: float) -> Optimizer:
        optimizer = with_options(weights, rate, 0.0)

        def set_rate(*_: Any) -> None:
            optimizer.param_groups[0]["lr"] *= 0.5

        optimizer.register_step_pre_hook(set_rate)
        return optimizer

    for last, rate in ((2, 0.25), (3, 0.25), (4, 0.125), (5, 0.125)):
        train(f"file://{tmp_path}", None, last, make=functools.partial(make, rate=rate))
    assert "options of the checkpoint" not in caplog.text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_option_that_is_put_back_after_a_load_counts(strategy: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    made: list[Optimizer] = []

    def make(weights: Iterator[nn.Parameter]) -> Optimizer:
        made.append(with_own_decay(weights))
        return made[-1]

    train(uri, None, 2, strategy, make=lambda weights: with_options(weights, 0.25, 0.25))
    train(uri, None, 3, strategy, make=make)
    assert [group["weight_decay"] for group in made[0].param_groups] == [0.5]


def test_a_schedule_that_is_scaled_changes_the_rates_of_a_run(tmp_path: Path) -> None:
    """From the second step after the resume on; the first has the rate of the commit."""
    rates: list[float] = []

    def schedule(factor: float) -> Callable[[Optimizer], LRScheduler]:
        return lambda optimizer: LambdaLR(optimizer, lambda step: factor)

    def make(weights: Iterator[nn.Parameter]) -> Optimizer:
        optimizer = with_options(weights, 0.25, 0.0)
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer

    train(f"file://{tmp_path}", schedule(1.0), 2, make=make)
    rates.clear()
    train(f"file://{tmp_path}", schedule(0.5), 4, make=make)
    assert rates[-2:] == [0.25, 0.125]


GROUPS: dict[str, Callable[[nn.Parameter, nn.Parameter], list[dict[str, Any]]]] = {
    "first": lambda weight, bias: [{"params": []}, {"params": [weight]}, {"params": [bias], "lr": 0.1}],
    "in between": lambda weight, bias: [{"params": [weight]}, {"params": []}, {"params": [bias], "lr": 0.1}],
    "last": lambda weight, bias: [{"params": [weight]}, {"params": [bias], "lr": 0.1}, {"params": []}],
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("place", GROUPS)
def test_a_run_with_an_empty_group_of_parameters_resumes(place: str, strategy: str, tmp_path: Path) -> None:
    def run(uri: str, last: int) -> torch.Tensor:
        return train(
            uri, schedule_of_groups, last, strategy, make=lambda each: torch.optim.AdamW(GROUPS[place](*each))
        )

    whole = run(f"file://{tmp_path}/whole", STEPS)
    run(f"file://{tmp_path}/halves", STEPS // 2)
    assert torch.equal(run(f"file://{tmp_path}/halves", STEPS), whole)


def schedule_of_groups(optimizer: Optimizer) -> LRScheduler:
    """It fails unless the optimizer has its three groups."""
    return LambdaLR(optimizer, [lambda step: 0.9**step] * 3)


def halving(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize(
    ("schedule", "is_split"),
    [
        pytest.param(halving, True, id="split"),
        pytest.param(halving, False, id="joined"),
        pytest.param(lambda optimizer: SequentialLR(optimizer, [halving(optimizer)], []), True, id="sequence"),
    ],
)
def test_a_run_with_other_groups_of_parameters_keeps_the_rates_of_the_commit(
    schedule: Callable[[Optimizer], LRScheduler], is_split: bool, tmp_path: Path
) -> None:
    rates: list[list[float]] = []

    def in_one(weights: Iterator[nn.Parameter], rate: float = 0.5) -> Optimizer:
        return torch.optim.AdamW(weights, rate)

    def in_two(weights: Iterator[nn.Parameter], rate: float = 0.5) -> Optimizer:
        return torch.optim.AdamW([{"params": [each]} for each in weights], rate)

    first, second = (in_one, in_two) if is_split else (in_two, in_one)

    def make(weights: Iterator[nn.Parameter]) -> Optimizer:
        optimizer = second(weights, 0.25)
        optimizer.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer

    train(f"file://{tmp_path}", schedule, 2, make=first)
    train(f"file://{tmp_path}", schedule, 4, make=make)
    number = 2 if is_split else 1
    assert rates[-2:] == [[0.5 * 0.5**step] * number for step in (2, 3)]


def test_a_run_whose_groups_of_parameters_are_in_another_order_keeps_their_rates(tmp_path: Path) -> None:
    """Base rates follow their group, also after the first step."""
    rates: list[tuple[float, float]] = []

    def make(weights: Iterator[nn.Parameter], *, turned: bool) -> Optimizer:
        weight, bias = weights
        groups = [{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups[::-1] if turned else groups)
        optimizer.register_step_pre_hook(
            lambda *_: rates.append((rate_of(optimizer, weight), rate_of(optimizer, bias)))
        )
        return optimizer

    for last, turned in ((2, False), (5, True)):
        train(f"file://{tmp_path}", halving, last, make=functools.partial(make, turned=turned))
    assert rates[-3:] == [(0.1 * 0.5**step, 0.2 * 0.5**step) for step in (2, 3, 4)]


def rate_of(optimizer: Optimizer, parameter: nn.Parameter) -> float:
    groups = optimizer.param_groups
    return float(next(group["lr"] for group in groups if any(each is parameter for each in group["params"])))


class HalfMomentum(Optimizer):
    """Its momentum is bf16, whatever the weights are, as of AnyPrecisionAdamW."""

    def __init__(self, weights: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    zero = torch.zeros_like(weight, dtype=torch.bfloat16)
                    moments = self.state[weight].setdefault("moments", {"first": zero})
                    moments["first"].mul_(0.9).add_(weight.grad.to(torch.bfloat16), alpha=0.1)
                    weight.add_(moments["first"].to(weight.dtype), alpha=-group["lr"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (torch.optim.NAdam, torch.bfloat16),
        (torch.optim.NAdam, torch.float64),
        (torch.optim.ASGD, torch.bfloat16),
        (torch.optim.ASGD, torch.float64),
        (HalfMomentum, torch.float32),
    ],
)
def test_a_state_of_another_type_than_its_parameter_keeps_it(
    kind: Callable[..., Optimizer], dtype: torch.dtype, strategy: str, tmp_path: Path
) -> None:
    def run(uri: str, last: int) -> torch.Tensor:
        return train(uri, None, last, strategy, make=lambda weights: kind(weights, lr=0.01), dtype=dtype)

    whole = run(f"file://{tmp_path}/whole", STEPS)
    for last in (STEPS // 3, STEPS // 2):
        run(f"file://{tmp_path}/parts", last)
    assert torch.equal(run(f"file://{tmp_path}/parts", STEPS), whole)


class Factors(torch.optim.SGD):
    """It keeps a list of tensors and a word, as SOAP and Shampoo do, and scales by them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            factors = state.setdefault("kept", {"factors": [torch.ones(()), torch.ones(())], "side": "both"})[
                "factors"
            ]
            factors[0].mul_(0.5)
            factors[1].add_(1)
            parameter.sub_(parameter.grad, alpha=0.01 * float(factors[0] * factors[1]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_lists_and_words_in_the_state_of_an_optimizer_are_resumed(strategy: str, tmp_path: Path) -> None:
    def run(uri: str, last: int) -> torch.Tensor:
        return train(uri, None, last, strategy, make=lambda weights: Factors(weights, lr=0.01))

    whole = run(f"file://{tmp_path}/whole", STEPS)
    run(f"file://{tmp_path}/parts", STEPS // 2)
    assert torch.equal(run(f"file://{tmp_path}/parts", STEPS), whole)


class Projecting(torch.optim.SGD):
    """It keeps an object, as GaLore does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("kept", {"projector": object()})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("is_resumed", [False, True], ids=["new", "resumed"])
def test_a_state_that_no_checkpoint_can_hold_is_refused_by_its_name(
    is_resumed: bool, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_resumed:
        train(f"file://{tmp_path}", None, 2, strategy, make=lambda weights: torch.optim.SGD(weights, 0.1, 0.9))
    with pytest.raises((UnsupportedState, SystemExit)) as ended:
        train(f"file://{tmp_path}", None, 4, strategy, make=Projecting)
    said = "The state at 'optimizer.state.weight.kept.projector' is a builtins.object, which can't be stored"
    assert said in f"{ended.value} {capsys.readouterr().err}"


class Lossy(Int8):
    """What is made again of it isn't it."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: list[Any], size: Any, stride: Any) -> Int8:
        return Int8(inner["codes"], inner["scale"] * 2, context[0])


class Wrapping(torch.optim.SGD):
    kind: type[Int8] = Int8

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = self.kind.of(parameter.detach())


class WrappingLossily(Wrapping):
    kind = Lossy


def test_a_state_that_would_be_another_after_a_resume_is_refused_after_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"file://{tmp_path}/whole", None, 2, make=Wrapping)
    with pytest.raises(SystemExit):
        train(f"file://{tmp_path}/lossy", None, 2, make=WrappingLossily)
    assert (
        "The optimizer's state 'average.inner.scale' of bias has other values after it is loaded"
        in capsys.readouterr().err
    )


class ProjectingLate(torch.optim.SGD):
    """Its momentum is joined by an object in the third step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
        super().step()
        if self.param_groups[0]["number"] == 3:
            self.state[self.param_groups[0]["params"][0]]["projector"] = object()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_state_that_no_commit_can_hold_any_more_costs_that_state_and_not_the_step(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(weights: Iterator[nn.Parameter]) -> Optimizer:
        return ProjectingLate(weights, lr=0.01, momentum=0.9)

    train(f"file://{tmp_path}", None, 4, strategy, make=make)
    assert (
        "The checkpoint of step 4 is without the optimizer's state of weight, which a resume would start afresh. The "
        "state at 'optimizer.state.weight.projector' is a builtins.object" in caplog.text
    )
    step, tensors, tree = newest_commit(tmp_path)
    assert (step, tree["optimizer"]["groups"][0]["number"]) == (4, 4)
    assert {name for name in tensors if name.startswith("optimizer.")} == {"optimizer.state.bias.momentum_buffer"}
    train(f"file://{tmp_path}", None, 5, strategy, make=make)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_state_of_another_optimizer_is_refused_by_its_name(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"file://{tmp_path}", None, 2, strategy, make=lambda weights: torch.optim.SGD(weights, 0.1, 0.9))
    with pytest.raises(SystemExit):
        train(f"file://{tmp_path}", None, 4, strategy, make=torch.optim.AdamW)
    said = "The checkpoint holds the state of the optimizer SGD, and the script makes AdamW"
    assert said in capsys.readouterr().err


class Averages(Optimizer):
    """Its steps are numbers, as of Hugging Face's Adafactor.

    Equal ones are one object.
    """

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["average"] = state.get("average", 0.0) + parameter.grad


def named(model: nn.Module, optimizer: Optimizer) -> NamedOptimizer:
    return NamedOptimizer(optimizer, {parameter: name for name, parameter in model.named_parameters()})


def test_a_parameter_that_no_step_has_used_takes_no_state_from_others() -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        return model, Averages(model.parameters())

    model, optimizer = build()
    model["used"](torch.ones(1, 2)).sum().backward()  # type: ignore[index]
    optimizer.step()
    optimizer.step()
    saved = named(model, optimizer).state()
    model, optimizer = build()
    named(model, optimizer).load(saved)
    states = {name: optimizer.state.get(parameter) for name, parameter in model.named_parameters()}
    assert states["unused.weight"] is None
    assert states["used.weight"] == {"step": 2, "average": pytest.approx(torch.full((2, 2), 2.0))}


def test_a_commit_before_the_first_update_holds_no_state_of_the_optimizer() -> None:
    """Adam corrects its moments by the number of updates."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert named(model, optimizer).state()["state"] == {}
    assert not optimizer.state
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [state["step"] for state in optimizer.state.values()] == [1, 1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_step_hooks_of_the_optimizer_see_the_steps_of_the_run_alone(
    make: Callable[..., Optimizer], strategy: str, tmp_path: Path
) -> None:
    seen: list[str] = []

    def with_hooks(weights: Iterator[nn.Parameter]) -> Optimizer:
        optimizer = make(weights, lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        return optimizer

    train(f"file://{tmp_path}", None, 2, strategy, make=with_hooks)
    assert seen == ["before", "after"] * 2
    train(f"file://{tmp_path}", None, 3, strategy, make=with_hooks)
    assert seen == ["before", "after"] * 3
