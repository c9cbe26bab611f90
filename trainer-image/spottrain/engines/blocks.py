"""The blocks of a model.

A block is a module whose parameters are gathered, recomputed or compiled as one. A block's parameters are gathered
when the block is called as a module. So blocks are modules that models are known to call: the items of lists or,
without lists, parts by their size. Parameters outside all blocks stay with the model as a whole, which always works
and only costs memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# An item of a list with more than this share of the model's parameters is a stage, which holds a list of its own.
STAGE_SHARE = 1 / 8
# Without lists: the largest share of the model's parameters in one block.
BLOCK_SHARE = 1 / 4
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Modules that use the parameters of their children without calling them.
_WHOLE = (nn.MultiheadAttention,)
# Lists of which each sample uses a few items. Ranks would gather different ones, and wait for each other for ever.
_CHOSEN_BY_SAMPLE = "expert"


def find_blocks(model: nn.Module, classes: Collection[type[nn.Module]] | None = None) -> list[nn.Module]:
    """Find the blocks of a model, outer ones before inner ones.

    Args:
        model: The model.
        classes: Classes of the blocks. None: the items of the model's lists or, without lists, its parts by size.

    Raises:
        ValueError: The model has no module of `classes`.
    """
    if classes is not None:
        return _of_classes(model, classes)
    total = _num_parameters(model)
    found = list(_items(model, total)) or list(_parts(model, total))
    found = [module for module in dict.fromkeys(found) if module is not model and _is_called(module)]
    leaky = {module for module, _ in used_from_outside(model, found)}
    return [module for module in found if _num_parameters(module) and module not in leaky]


def used_from_outside(model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Find the modules that share a parameter with other modules of the model.

    The others need the parameter while the module is not called. Yields each module with one such parameter.
    """
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    users = _users_of_parameters(model)
    for module in modules:
        own = _users_of_parameters(module)
        shared = next((p for p, number in own.items() if places[module] * number != users[p]), None)
        if shared is not None:
            yield module, shared


def prepare_blocks(model: nn.Module, blocks: Iterable[nn.Module], *, compiled: bool, checkpointed: bool) -> None:
    """Compile the blocks, and recompute their activations in backward. A model without blocks is one block.

    Only `forward` is replaced: hooks, such as those that gather parameters, stay outside, and names do not change.
    """
    chosen = set(blocks) or {model}
    inner = {module for block in chosen for module in block.modules() if module is not block}
    for block in chosen - inner:
        if compiled:
            block.forward = torch.compile(block.forward)
        if checkpointed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _of_classes(model: nn.Module, classes: Collection[type[nn.Module]]) -> list[nn.Module]:
    found = [module for module in model.modules() if isinstance(module, tuple(classes)) and module is not model]
    if classes and not found:
        names = ", ".join(sorted(cls.__name__ for cls in classes))
        raise ValueError(f"the model has no module of the classes to wrap ({names}); name other classes, or none")
    return found


def _items(module: nn.Module, total: int) -> Iterator[nn.Module]:
    """The items of the outermost lists, of nested lists, and of stages' lists."""
    if _repeats(module):
        for item in module.children():
            yield from _units(item, total)
        return
    for child in _children(module):
        yield from _items(child, total)


def _units(item: nn.Module, total: int) -> Iterator[nn.Module]:
    """The blocks that an item of a list stands for: itself, or blocks inside."""
    if isinstance(item, _LISTS) and not _is_called(item):
        for inner in item.children():
            yield from _units(inner, total)
    elif _is_stage(item, total):
        yield from _items(item, total)
    else:
        yield item


def _is_stage(item: nn.Module, total: int) -> bool:
    """Whether an item of a list is a container of blocks. A block is more than a single layer."""
    if isinstance(item, _LISTS):
        return _repeats(item)
    if _num_parameters(item) <= STAGE_SHARE * total:
        return False
    blocks = [block for child in _children(item) for block in _items(child, total)]
    return any(any(block.children()) for block in blocks)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """The children that are called for every sample."""
    if not isinstance(module, _WHOLE):
        yield from (child for name, child in module.named_children() if _CHOSEN_BY_SAMPLE not in name.lower())


def _repeats(module: nn.Module) -> bool:
    """Whether it is a list of lists, or one with several items of one class."""
    if not isinstance(module, _LISTS):
        return False
    items = module._modules.values()  # children() would omit repeated items
    counted = Counter(type(item) for item in items if item is not None and _num_parameters(item))
    return any(number > 1 or issubclass(cls, _LISTS) for cls, number in counted.items())


def _parts(module: nn.Module, total: int) -> Iterator[nn.Module]:
    """The largest modules with no more than BLOCK_SHARE of the parameters."""
    for child in _children(module):
        if _num_parameters(child) <= BLOCK_SHARE * total or isinstance(child, _WHOLE) or not any(child.children()):
            yield child
        else:
            yield from _parts(child, total)


def _is_called(module: nn.Module) -> bool:
    """Whether a module is called. Lists have no forward; an embedding's weight is often used without a call."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.Embedding)


def _users_of_parameters(model: nn.Module) -> Counter[nn.Parameter]:
    """The number of places that use each parameter.

    There are several if weights are tied, or if a module occurs several times.
    """
    every = (module for _, module in model.named_modules(remove_duplicate=False))
    return Counter(parameter for module in every for parameter in module.parameters(recurse=False))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
