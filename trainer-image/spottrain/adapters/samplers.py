"""The order of the samples in a framework, judged by the sampler that it makes."""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler

from spottrain.world.failures import UserError


def ordering(sampler: Any, num_samples: int, owner: str) -> dict[str, Any]:
    """What `Session.adopt` is given for a sampler: `shuffle` or `order`.

    A random or a sequential one stands for the job's own order. The samples of another are drawn for each epoch, with
    random numbers that are seeded for it.

    Args:
        sampler: Made for the whole batch, as on one rank.
        num_samples: Samples of the data set.
        owner: The class that has made it, for messages.

    Raises:
        UserError: It leaves out samples of an epoch, or has some several times.
    """
    if len(sampler) != num_samples:
        raise UserError(
            f"{owner} brings an order of samples of its own (_get_train_sampler), with {len(sampler)} of them in an "
            f"epoch of {num_samples}, and the Trainer counts epochs by the data set. Put the order into "
            "train_dataset, one item per use of a sample, and set train_sampling_strategy to sequential"
        )
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None:
        return {"shuffle": True}

    def order(epoch: int) -> list[int]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return list(sampler)

    return {"order": order}
