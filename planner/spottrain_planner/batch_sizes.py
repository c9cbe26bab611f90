"""How many samples of a step are in the micro-batches of the ranks.

Samples are dealt out in units of `multiple_of`, so that every micro-batch has a multiple of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from spottrain_runtime.wording import listed

# More numbers than that are not read.
_MOST = 6


def part(total: int, index: int, parts: int, unit: int = 1) -> range:
    """Part `index` of `total` samples in so many parts, of whole units. Sizes differ by at most one unit."""
    units = total // unit
    return range(index * units // parts * unit, (index + 1) * units // parts * unit)


def num_micro_batches(global_batch: int, micro_batch: int, world_size: int, multiple_of: int = 1) -> int:
    """Micro-batches that every rank runs in a step: those of the largest share."""
    largest_share = -(-(global_batch // multiple_of) // world_size)
    return -(-largest_share // (micro_batch // multiple_of))


def micro_batch_sizes(global_batch: int, micro_batch: int, world_size: int) -> tuple[int, ...]:
    """The different numbers of samples of a step's micro-batches, in ascending order."""
    number = num_micro_batches(global_batch, micro_batch, world_size)
    shares = {global_batch // world_size, -(-global_batch // world_size)}
    sizes = {size for share in shares for size in (share // number, -(-share // number))}
    return tuple(sorted(sizes - {0}))


def sizes_that_differ(global_batch: int, micro_batch: int, world_sizes: Iterable[int]) -> str | None:
    """A sentence about micro-batches whose size depends on the rank or on the number of ranks. None: it doesn't."""
    worlds = defaultdict(list)
    for world_size in world_sizes:
        worlds[micro_batch_sizes(global_batch, micro_batch, world_size)].append(world_size)
    if len(worlds) == 1 and all(len(sizes) == 1 for sizes in worlds):
        return None
    parts = [
        f"{' or '.join(map(str, sizes))} at {_numbers(numbers)} {'rank' if numbers == [1] else 'ranks'}"
        for sizes, numbers in worlds.items()
    ]
    return (
        f"Samples of a micro-batch: {listed(parts, most=_MOST)}. If the script needs a multiple of a number, such as "
        "an even one for Mixup, set it in batch.multipleOf."
    )


def _numbers(numbers: Sequence[int]) -> str:
    words = [str(number) for number in numbers]
    return " and ".join(", ".join(words).rsplit(", ", 1)) if len(words) <= _MOST else listed(words, most=_MOST)
