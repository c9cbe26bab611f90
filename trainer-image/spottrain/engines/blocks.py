"""The blocks of a model: the modules whose parameters are gathered, recomputed or compiled as one.

A block has to be called as a module, as that is when its parameters are gathered. So only what models are known
to call is taken: the items of lists, and where there are none, parts by their size. What belongs to no block is
kept with the model as a whole, which always works and only costs memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# An item of a list with more than this part of the model's parameters is a stage, with a list of its own in it.
STAGE_SHARE = 1 / 8
# Where a model has no lists: the largest part of its parameters in one block.
BLOCK_SHARE = 1 / 4
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# They use the parameters of their children without calling these.
_WHOLE = (nn.MultiheadAttention,)
# Lists of which each sample uses a few items: ranks would gather different ones, and wait for each other for ever.
_CHOSEN_BY_SAMPLE = "expert"


def find_blocks(model: nn.Module, classes: Collection[type[nn.Module]] | None = None) -> list[nn.Module]:
    """The blocks of `model`, outer ones before inner ones: the modules of `classes`, or where that is None, the
    items of its lists, and in a model without lists its parts by size. Raises ValueError where `classes` don't
    occur."""
    if classes is not None:
        return _of_classes(model, classes)
    total = _num_parameters(model)
    found = list(_items(model, total)) or list(_parts(model, total))
    found = [module for module in dict.fromkeys(found) if module is not model and _is_called(module)]
    leaky = {module for module, _ in used_from_outside(model, found)}
    return [module for module in found if _num_parameters(module) and module not in leaky]


def used_from_outside(model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Those of the modules that share a parameter with others of the model, which would not find it while the module
    isn't called, and one such parameter of each."""
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    users = _users_of_parameters(model)
    for module in modules:
        own = _users_of_parameters(module)
        shared = next((p for p, number in own.items() if places[module] * number != users[p]), None)
        if shared is not None:
            yield module, shared


def prepare_blocks(model: nn.Module, blocks: Iterable[nn.Module], *, compiled: bool, checkpointed: bool) -> None:
    """From now on the blocks run compiled, and their activations are computed again in backward. A model without
    blocks is taken as one.

    Only `forward` is replaced: hooks, such as those that gather parameters, stay outside, and names stay as they are.
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
        raise ValueError(f"the model has no module of the classes to wrap ({names}); name others, or none")
    return found


def _items(module: nn.Module, total: int) -> Iterator[nn.Module]:
    """The items of the outermost lists, of lists in lists, and of the lists of stages."""
    if _repeats(module):
        for item in module.children():
            yield from _units(item, total)
        return
    for child in _children(module):
        yield from _items(child, total)


def _units(item: nn.Module, total: int) -> Iterator[nn.Module]:
    """What an item of a list stands for: itself, or what it is there for."""
    if isinstance(item, _LISTS) and not _is_called(item):
        for inner in item.children():
            yield from _units(inner, total)
    elif _is_stage(item, total):
        yield from _items(item, total)
    else:
        yield item


def _is_stage(item: nn.Module, total: int) -> bool:
    """Whether an item of a list is there for the blocks in it, which are more than single layers."""
    if isinstance(item, _LISTS):
        return _repeats(item)
    if _num_parameters(item) <= STAGE_SHARE * total:
        return False
    blocks = [block for child in _children(item) for block in _items(child, total)]
    return any(any(block.children()) for block in blocks)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Those that are called for every sample, and with them their parameters used."""
    if not isinstance(module, _WHOLE):
        yield from (child for name, child in module.named_children() if _CHOSEN_BY_SAMPLE not in name.lower())


def _repeats(module: nn.Module) -> bool:
    """Whether it is a list with several items of one class, or of lists."""
    if not isinstance(module, _LISTS):
        return False
    items = module._modules.values()  # children() would leave out an item that is there several times
    counted = Counter(type(item) for item in items if item is not None and _num_parameters(item))
    return any(number > 1 or issubclass(cls, _LISTS) for cls, number in counted.items())


def _parts(module: nn.Module, total: int) -> Iterator[nn.Module]:
    """The largest modules that hold no more than their share."""
    for child in _children(module):
        if _num_parameters(child) <= BLOCK_SHARE * total or isinstance(child, _WHOLE) or not any(child.children()):
            yield child
        else:
            yield from _parts(child, total)


def _is_called(module: nn.Module) -> bool:
    """Lists have no forward; an embedding's weight is often used a second time without calling it."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.Embedding)


def _users_of_parameters(model: nn.Module) -> Counter[nn.Parameter]:
    """At how many places each parameter is used: more than one where weights are tied, or a module is there several
    times."""
    every = (module for _, module in model.named_modules(remove_duplicate=False))
    return Counter(parameter for module in every for parameter in module.parameters(recurse=False))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
