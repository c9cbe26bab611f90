"""Optimizers of all kinds, as torch, its users and other libraries make them.

`KINDS` has a function for each that makes it from parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

Parameters = list[nn.Parameter]


class WithOptions(Optimizer):
    """Has the options of its class in each group."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, **self.options})


class Own(WithOptions, ABC):
    """Steps parameter by parameter, by `update`, with the options of its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def begin(self, group: dict[str, Any]) -> None:
        """Once for each group of a step."""

    @abstractmethod
    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter and its state in place."""


class Lion(Own):
    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.sub_(torch.tanh(50 * average.lerp(gradient, 0.1)), alpha=group["lr"])
        average.lerp_(gradient, 0.01)


class Halving(Own):
    """No state for a parameter; decay without a rate, and a counter in the group."""

    options: ClassVar = {"calls": 0}

    def begin(self, group: dict[str, Any]) -> None:
        group["calls"] += 1

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.mul_(1 - 0.5 / group["calls"] ** 2)


class Late(Own):
    """Its counter appears in the first step, and its momentum in the third."""

    def begin(self, group: dict[str, Any]) -> None:
        group["number"] = group.get("number", 0) + 1

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["number"] > 2:
            state["late"] = state["late"] * 0.5 + gradient if "late" in state else gradient.clone()
        parameter.sub_(state.get("late", gradient), alpha=group["lr"] / group["number"])


class Numbers(Own):
    """Its counters are Python's numbers, as of Hugging Face's Adafactor."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state["kind"] = "average"
        state["average"] = state.get("average", 0.0) + gradient
        parameter.sub_(state["average"] / state["step"], alpha=group["lr"])


class HalfMomentum(Own):
    """Its momentum lies in a dict, and is bf16 whatever the weights are."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        moments = state.setdefault("moments", {"first": torch.zeros_like(parameter, dtype=torch.bfloat16)})
        moments["first"].mul_(0.9).add_(gradient.to(torch.bfloat16), alpha=0.1)
        parameter.sub_(moments["first"].to(parameter.dtype), alpha=group["lr"])


class BlendedMomenta(Own):
    """A fast and a slow momentum, as AdEMAMix."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        for name, share in (("fast", 0.5), ("slow", 0.1)):
            state.setdefault(name, torch.zeros_like(parameter)).lerp_(gradient, share)
        parameter.sub_(state["fast"] + state["slow"], alpha=group["lr"])


class ScheduleFree(Own):
    """Steps in its train mode alone, whose weights lie between two sequences. Its group counts."""

    options: ClassVar = {"k": 0, "train_mode": False, "weight_sum": 0.0}

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def begin(self, group: dict[str, Any]) -> None:
        if not group["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        group["k"] += 1
        group["weight_sum"] += float(group["k"])

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        z = state.setdefault("z", parameter.clone())
        parameter.lerp_(z, group["k"] / group["weight_sum"])
        parameter.sub_(gradient, alpha=0.1 * group["lr"])
        z.sub_(gradient, alpha=group["lr"])


class Prodigy(Own):
    """Its rate depends on all gradients, and lies in the group as a number."""

    options: ClassVar = {"d": 1e-2}

    def begin(self, group: dict[str, Any]) -> None:
        sums = [(each.grad * each.grad).sum() for each in group["params"] if each.grad is not None]
        sums = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in sums]
        group["d"] += 1e-3 * float(sum(sums))

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(state.setdefault("m", torch.zeros_like(parameter)).lerp_(gradient, 0.5), alpha=group["d"])


class Lamb(Own):
    """Scales each update by norms."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(gradient, 0.5)
        parameter.sub_(average * (parameter.norm() / (average.norm() + 1e-6)) * group["lr"])


class MuonWithAuxAdam(Own):
    """Orthogonal updates for matrices, Adam's for others. Its step has no closure."""

    def step(self) -> None:  # type: ignore[override]
        super().step()

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter)).lerp_(gradient, 0.5)
        if parameter.dim() < 2:
            square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter)).lerp_(gradient.square(), 0.1)
            parameter.sub_(momentum / (square.sqrt() + 1e-3), alpha=group["lr"])
            return
        x = momentum / (momentum.norm() + 1e-6)
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ x.mT) @ x
        parameter.sub_(x, alpha=group["lr"])


class Soap(Own):
    """Keeps lists of matrices, one for each dimension."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        factors = state.setdefault("GG", [torch.zeros(size, size) for size in parameter.shape])
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for number, factor in enumerate(factors):
            flat = whole.movedim(number, 0).reshape(len(factor), -1)
            factor.lerp_(flat @ flat.T, 0.5)
        parameter.sub_(gradient / (1 + float(sum(factor.trace() for factor in factors))), alpha=group["lr"])


class Int8(torch.Tensor):
    """A tensor of int8 numbers and a scale for each two, as torchao's states of optimizers."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Int8:
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> Int8:
        blocks = nn.functional.pad(values.flatten(), (0, values.numel() % 2)).view(-1, 2)
        scale = blocks.abs().amax(dim=1).clamp(min=1e-12) / 127
        codes = (blocks / scale[:, None]).round().to(torch.int8).flatten()[: values.numel()].view(values.shape)
        return cls(codes, scale, values.dtype)

    def values(self) -> torch.Tensor:
        scale = self.scale.repeat_interleave(2)[: self.codes.numel()].view(self.codes.shape)
        return self.codes.to(self.dtype) * scale

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.dtype, self.codes.shape]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: list[Any], size: Any, stride: Any) -> Int8:
        assert context[1] == size
        return Int8(inner["codes"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale, args[0].dtype)
        plain = tree_map(lambda each: each.values() if isinstance(each, cls) else each, args)
        return func(*plain, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class EightBits(Own):
    """Its momentum is a tensor that wraps others, as of torchao's AdamW8bit."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        before = state.get("momentum")
        if isinstance(parameter, DTensor):  # of its shard, as torchao's
            own, local = parameter.to_local(), gradient.to_local()
            now = (before.to_local().values() if before is not None else torch.zeros_like(own)).lerp(local, 0.5)
            state["momentum"] = DTensor.from_local(
                Int8.of(now),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            own = parameter
            now = (before.values() if before is not None else torch.zeros_like(own)).lerp(gradient, 0.5)
            state["momentum"] = Int8.of(now)
        own.sub_(now, alpha=group["lr"])


class Blockwise(Own):
    """Plain numbers for each two elements, as of bitsandbytes."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["absmax"] = torch.full((parameter.numel() // 2 + 1,), 0.5 + state.get("absmax", torch.zeros(1))[0])
        parameter.sub_(gradient, alpha=group["lr"] * float(state["absmax"][0]))


class Beside(Own):
    """Counts in a state that is of no parameter, beside a history that is a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        counted = self.state["all"]  # type: ignore[index]
        counted["steps"] = counted.get("steps", 0) + 1
        counted["history"] = [*counted.get("history", []), [counted["steps"], 0.5]]
        super().step()

    def update(self, parameter: Any, gradient: Any, state: Any, options: Any) -> None:
        parameter.add_(gradient, alpha=-options["lr"] * self.state["all"]["steps"])  # type: ignore[index]


class Lookahead(WithOptions):
    """Shares state and groups with an optimizer that it keeps, and counts steps in an attribute."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.base = torch.optim.AdamW(self.param_groups, lr=0.05)
        self.base.param_groups, self.base.state = self.param_groups, self.state
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                state = self.state[parameter]
                slow = state["slow"] = state["slow"] if "slow" in state else parameter.clone()
                if self.steps % 2 == 0:
                    slow.add_(parameter - slow, alpha=0.5)
                    parameter.copy_(slow)


class Galore(Own):
    """Keeps an object that no commit can hold."""

    def update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("projector", object())
        parameter.sub_(gradient, alpha=group["lr"])


class OfRank(WithOptions):
    """Shards its state over the ranks by itself: each updates its own parameters, and all exchange the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(momentum.lerp_(parameter.grad, 0.5), alpha=0.01)
            dist.broadcast(parameter, owner)


def _of(kind: Callable[..., Optimizer], **options: Any) -> Callable[[Parameters], Optimizer]:
    return lambda parameters: kind(parameters, **options)


KINDS: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD": _of(torch.optim.SGD, lr=0.05),
    "SGD dampened": _of(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SGD nesterov": _of(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": _of(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "Adam amsgrad": _of(torch.optim.Adam, lr=0.01, amsgrad=True, maximize=True),
    "AdamW": _of(torch.optim.AdamW, lr=0.01),
    "AdamW foreach": _of(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW rate in tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "AdamW groups": lambda parameters: torch.optim.AdamW(
        [{"params": [each], "weight_decay": 0.1 * number} for number, each in enumerate(parameters)], lr=0.01
    ),
    "Adamax": _of(torch.optim.Adamax, lr=0.01, weight_decay=0.1),
    "Adadelta": _of(torch.optim.Adadelta, lr=0.5, weight_decay=0.1),
    "Adagrad": _of(torch.optim.Adagrad),
    "ASGD": _of(torch.optim.ASGD, lr=0.05, weight_decay=0.1, t0=2),
    "NAdam": _of(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "RAdam": _of(torch.optim.RAdam, lr=0.01, weight_decay=0.1),
    "RMSprop": _of(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, weight_decay=0.1),
    "Rprop": _of(torch.optim.Rprop, lr=0.01),
    "Adafactor": _of(torch.optim.Adafactor, lr=0.05),
    "LBFGS": _of(torch.optim.LBFGS),
    "ZeroRedundancyOptimizer": _of(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam, lr=0.01),
    "Halving groups": lambda parameters: Halving([{"params": [each]} for each in parameters]),
    **{
        kind.__name__: _of(kind)
        for kind in (
            *(Lion, Halving, Late, Numbers, HalfMomentum, BlendedMomenta, ScheduleFree, Prodigy, Lamb),
            *(MuonWithAuxAdam, Soap, EightBits, Blockwise, Beside, Lookahead, Galore, OfRank),
        )
    },
}
