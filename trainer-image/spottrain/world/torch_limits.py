"""Limits of torch and DeepSpeed, by the errors that they end in. docs/reference/limits.md lists them."""

from __future__ import annotations

import re

_LIMITS = (
    (
        r"out of bounds for storage of size 0",
        "FSDP2 has let go of the parameters by then: torch computes no second-order gradients "
        "(create_graph=True) of sharded models. Use the strategy ddp.",
    ),
    (
        r"must be a matrix, got 1-D tensor",
        "If the strategy is deepspeed at stage 3, its parameters are empty outside of a plain forward and backward "
        "pass: it computes no second-order gradients (create_graph=True). Use stage 2, or the strategy ddp.",
    ),
    (
        r"Inplace update to inference tensor outside InferenceMode",
        "If the strategy is fsdp, its first forward pass makes tensors that training uses later. Evaluate with "
        "torch.no_grad instead of torch.inference_mode.",
    ),
    (
        r"cannot view shape \(.*\bj\d+",
        "If the strategy is deepspeed at stage 3, a module can't take nested tensors. Pad them, or use another "
        "strategy.",
    ),
    (
        r"in-place operations that require placement changes are not supported",
        "Under FSDP2, this operation would change how a tensor is spread over the ranks, as Muon's does for a matrix "
        "with fewer rows than there are ranks. Use another optimizer for that matrix, or the strategy ddp.",
    ),
    (
        r"_fused_\w+\.\w+ does not have a sharding strategy",
        "Under FSDP2, torch has no fused step of this optimizer. Make it without fused=True, or use ddp.",
    ),
)


def limit_of(error: BaseException) -> str | None:
    """What to do about an error that is a known limit, in sentences; None for any other error."""
    text = str(error)
    return next((advice for pattern, advice in _LIMITS if re.search(pattern, text)), None)
