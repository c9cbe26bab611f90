"""Buffers, which a model keeps besides its parameters: every rank has its own, a checkpoint rank 0's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from spottrain.engines.structure import described, digest_of, first_difference
from spottrain.world.failures import UserError

# Types and shapes of buffers by name. A lazy one, which the first sample materialises, has none.
Forms = dict[str, tuple[torch.dtype, torch.Size] | None]


class SharedBuffers:
    """The buffers of a model that checkpoints hold.

    Buffers may depend on the samples that a rank has seen, like the statistics of norms and the codebooks of
    quantizers. `share` after each step gives all ranks rank 0's, so that a rank resumes with what it had.
    DistributedDataParallel would share them before each forward pass. That is too late for a commit, in which every
    rank writes a part of what is the same on all.
    """

    def __init__(self, model: nn.Module) -> None:
        # A walk through the modules in each step would take a millisecond or more.
        self._modules = list(model.named_modules())
        self._model, self._forms = model, _forms(_saved_buffers(self._modules))
        self._lines: list[str] = []
        self._digest = digest_of([])

    def digest(self) -> int:
        """A positive number for the names, shapes and types of this rank's buffers, which has to be that of all."""
        lines = described(_saved_buffers(self._modules))
        if lines != self._lines:
            self._lines, self._digest = lines, digest_of(lines)
        return self._digest

    def refuse_difference(self, group: dist.ProcessGroup) -> NoReturn:
        """Raise UserError for buffers that differ between ranks. A collective."""
        raise UserError(
            f"The ranks have different buffers: {first_difference(self._lines, group)}. All ranks take over those of "
            "rank 0 after each step. Register the same buffers in the same order on all ranks, or pass "
            "persistent=False for those that no commit needs."
        )

    def exist(self) -> bool:
        """Whether there are any."""
        return next(_saved_buffers(self._modules), None) is not None

    def share(self) -> None:
        """Give all ranks rank 0's buffers, which have the same digest on all. A collective if there are any.

        Raises:
            UserError: The ranks can't share a buffer, or the model has changed what it commits.
        """
        buffers = list(_saved_buffers(self._modules))
        if (forms := _forms(buffers)) != self._forms:
            self._accept(forms)
        try:
            copy_from_first(buffer.detach() for _, buffer in buffers)
        except RuntimeError:
            _check_buffers(self._modules)
            raise

    def _accept(self, forms: Forms) -> None:
        """Refuse forms that a new process doesn't begin with: a commit of them could not be resumed from."""
        saved = {
            name for name, _ in _saved_buffers(changing_modules(self._model))
        } | self._forms.keys() - forms.keys()
        for name in sorted(saved):
            if self._forms.get(name, ()) is None:  # lazy, as in a job that resumes
                continue
            before, now = self._forms.get(name), forms.get(name)
            if before != now:
                raise UserError(
                    f"The buffer {name} of the model was {_shown(before)} at first, and is {_shown(now)} now. A "
                    "resume begins as at first, and could not load it. Register it as it stays in the constructor, "
                    "or pass persistent=False if no commit needs it."
                )
        self._forms = forms


def _forms(buffers: Iterable[tuple[str, torch.Tensor]]) -> Forms:
    return {name: None if is_lazy(buffer) else (buffer.dtype, buffer.shape) for name, buffer in buffers}


def _shown(form: tuple[torch.dtype, torch.Size] | None) -> str:
    return "not there" if form is None else f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Copy the values of the group's first rank. A collective of the group."""
    for tensor, whole, work in [_send(tensor, group) for tensor in tensors if tensor.numel()]:
        if work is not None:
            work.wait()
        if whole is not tensor:
            tensor.copy_(whole)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def check_buffers(model: nn.Module) -> None:
    """Raise UserError for a buffer whose bytes torch can't send, or can't replace.

    It is expanded, sparse, nested or conjugate. On another device, it may be plain: move the model first.
    """
    _check_buffers(model.named_modules())


def changing_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose buffers may change in training: of trained parameters, or all if nothing is frozen."""
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    for prefix, module in model.named_modules(remove_duplicate=False):
        if module._buffers and (is_whole or any(p.requires_grad for p in module.parameters(recurse=False))):
            yield prefix, module


def _check_buffers(modules: Iterable[tuple[str, nn.Module]]) -> None:
    for name, found in _saved_buffers(modules):
        if is_lazy(found) or not found.numel():
            continue
        buffer = found.detach()
        try:
            _bytes_of(whole := buffer.contiguous())
            if whole is not buffer:
                buffer.copy_(whole)
        except RuntimeError as error:
            raise UserError(
                f"the buffer {name} is more than a plain tensor, and can't be sent to the other ranks ({error}). "
                "Register what .clone() or .to_dense() makes of it, or pass persistent=False, if no commit needs it"
            ) from error


def _saved_buffers(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers in the state dict, by name. They are looked up each time, because models replace their tensors."""
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _bytes_of(whole: torch.Tensor) -> torch.Tensor:
    return whole.view(-1).view(torch.uint8)


def _send(
    tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, dist.Work | None]:
    """Broadcast as bytes, because backends do not support every type."""
    whole = tensor.contiguous()
    return tensor, whole, dist.broadcast(_bytes_of(whole), group=group, group_src=0, async_op=True)
