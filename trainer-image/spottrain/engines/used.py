"""The parameters that received a gradient in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from spottrain.world.failures import UserError

SECOND_GRADIENT = (
    "The parameter {} received a gradient twice in one backward pass: a part of it ran inside another one, as a "
    "checkpoint with use_reentrant=True does, over a module that is used several times. Its gradient would be added "
    "up wrongly over the ranks. Pass use_reentrant=False to torch.utils.checkpoint (in Hugging Face's models: "
    "gradient_checkpointing_kwargs)."
)


class UsedParameters:
    """Notes which trained parameters receive a gradient, in each backward pass and in the whole step.

    Raises UserError from within a backward pass that gives one of them two gradients.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        """`names` has those of the model's parameters."""
        self._trained = [(name, parameter) for parameter, name in names.items() if parameter.requires_grad]
        self._index = {parameter: index for index, (_, parameter) in enumerate(self._trained)}
        self._in_pass: set[int] = set()
        self._in_step: set[int] = set()
        self._is_paused = False

    def watch(self, parameter: nn.Parameter, computed: torch.Tensor | None = None) -> None:
        """Note what a parameter receives. `computed`: the tensor with which the model computes in its place."""
        (parameter if computed is None else computed).register_hook(self._note(self._index[parameter]))  # type: ignore[no-untyped-call]

    def watch_all(self) -> None:
        for _, parameter in self._trained:
            self.watch(parameter)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._index

    def begin_pass(self) -> None:
        """Call it before each backward pass."""
        self._in_pass = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients that no use has made."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def unused_in_pass(self) -> list[nn.Parameter]:
        """The parameters without a gradient from the newest backward pass on this rank."""
        return [parameter for index, (_, parameter) in enumerate(self._trained) if index not in self._in_pass]

    def pop_step(self) -> list[bool]:
        """Whether this rank has used each parameter since the last call."""
        used, self._in_step = self._in_step, set()
        return [index in used for index in range(len(self._trained))]

    def clear_unused(self, used: list[bool]) -> None:
        """Take the gradients of zero from parameters that no rank has used, as a plain loop has none for them."""
        for (_, parameter), is_used in zip(self._trained, used, strict=True):
            if not is_used:
                parameter.grad = None

    def names(self, chosen: list[bool]) -> Iterator[str]:
        return (name for (name, _), is_chosen in zip(self._trained, chosen, strict=True) if is_chosen)

    def _note(self, index: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            if self._is_paused:
                return
            if index in self._in_pass:
                raise UserError(SECOND_GRADIENT.format(self._trained[index][0]))
            self._in_pass.add(index)
            self._in_step.add(index)

        return note
