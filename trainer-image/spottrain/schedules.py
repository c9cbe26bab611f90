"""Learning rates as pure functions of the step.

They are for `Session.prepare(scheduler=...)`. Each is torch's LambdaLR, whose rate depends on the number of the step
alone. A run that was resumed, or has a different number of nodes, has the rates of one that was never interrupted.
Steps are optimizer steps of the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Callable[[Optimizer], LambdaLR]


def warmup_cosine(*, total: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Warm up linearly, then follow half a cosine down.

    Source: Loshchilov and Hutter, "SGDR", 2017, without restarts.

    Args:
        total: Steps of the run, after which the rate is at its floor.
        warmup: Steps up to the optimizer's rate.
        floor: Last rate, as a share of the optimizer's: 0 to 1.

    Returns:
        The schedule, for `Session.prepare(scheduler=...)`.

    Raises:
        ValueError: `warmup` is longer than `total`, or `floor` is not a share.

    Example:
        >>> import torch
        >>> from spottrain.schedules import warmup_cosine
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> schedule = warmup_cosine(total=100, warmup=10)(optimizer)
        >>> f"{schedule.get_last_lr()[0]:.2f}"  # a tenth of the rate at the first step
        '0.01'
    """
    _check(total, warmup, floor)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return lambda optimizer: LambdaLR(optimizer, factor)


def warmup_stable_decay(*, total: int, decay: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Warm up linearly, stay, then decay linearly. Source: Hu et al., "MiniCPM", 2024.

    Args:
        total: Steps of the run, after which the rate is at its floor.
        decay: Last steps, in which the rate falls.
        warmup: Steps up to the optimizer's rate.
        floor: Last rate, as a share of the optimizer's: 0 to 1.

    Returns:
        The schedule, for `Session.prepare(scheduler=...)`.

    Raises:
        ValueError: `warmup` and `decay` are longer than `total`, or `floor` is not a share.

    Example:
        >>> import torch
        >>> from spottrain.schedules import warmup_stable_decay
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> schedule = warmup_stable_decay(total=100, warmup=4, decay=20)(optimizer)
        >>> f"{schedule.get_last_lr()[0]:.3f}"  # a quarter of the rate at the first step
        '0.025'
    """
    _check(total, warmup + decay, floor)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        left = min(1.0, max(0, total - step) / max(1, decay))
        return floor + (1 - floor) * left

    return lambda optimizer: LambdaLR(optimizer, factor)


def _check(total: int, moving: int, floor: float) -> None:
    if not 0 <= moving <= total:
        raise ValueError(f"a schedule of {total} steps has no room for {moving} steps of warm-up and decay")
    if not 0 <= floor <= 1:
        raise ValueError(f"the floor of a schedule is a share of the learning rate from 0 to 1, not {floor:g}")
