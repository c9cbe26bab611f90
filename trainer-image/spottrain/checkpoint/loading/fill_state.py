"""Fill a state in memory from a checkpoint."""

from __future__ import annotations

from typing import Any

from spottrain.checkpoint.errors import CheckpointMismatch
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.dcp import load_tensors
from spottrain.checkpoint.format.manifest import Manifest
from spottrain.checkpoint.format.part_reader import PartReader

# Prefix of the names of an optimizer's state. The parameter's name follows, then the name of the value.
OPTIMIZER_STATE = "optimizer.state."
# Prefix of the names of an optimizer's options. The parameter's name follows, then the name of the option.
OPTIMIZER_OPTIONS = "optimizer.param_groups."


def fill_state(state: dict[str, Any], tensors: codec.Tensors, manifest: Manifest, parts: PartReader) -> None:
    """Fill the `tensors` of `state` in place, and replace its other values.

    Raises:
        CheckpointMismatch: The checkpoint doesn't fit. Nothing was read, and `state` is as it was.
        CorruptCheckpoint: Stored bytes are damaged.
    """
    tensors = dict(tensors)
    unknown = [key for key in state if key not in manifest.tree]
    if unknown:
        raise CheckpointMismatch(
            f"The checkpoint at step {manifest.step} has no {unknown[0]!r}: a different strategy or an older script "
            "made it. Use that one, or create a new job with a different checkpoint.uri."
        )
    for name in [*_of_unused_parameters(tensors, manifest), *_new_options(tensors, manifest)]:
        del tensors[name]
    load_tensors(tensors, manifest, parts)
    state.update(codec.join(manifest.tree, tensors))


def _of_unused_parameters(tensors: codec.Tensors, manifest: Manifest) -> list[str]:
    """Optimizer state of parameters that no step before the checkpoint had used.

    A fresh optimizer here has such state. The saved optimizer knew these parameters and had no state of them yet,
    because optimizers create it at a parameter's first update.
    """
    saved = [name.rpartition(".") for name in manifest.tensors if name.startswith(OPTIMIZER_STATE)]
    used, kinds = {parameter for parameter, _, _ in saved}, {kind for _, _, kind in saved}
    groups = {name.rpartition(".")[0] for name in manifest.tree.get("optimizer", ())}

    def is_unused(name: str) -> bool:
        parameter, _, kind = name.rpartition(".")
        group = f"param_groups.{parameter.removeprefix(OPTIMIZER_STATE)}"
        return name.startswith(OPTIMIZER_STATE) and parameter not in used and kind in kinds and group in groups

    return [name for name in tensors if is_unused(name)]


def _new_options(tensors: codec.Tensors, manifest: Manifest) -> list[str]:
    """Options that the optimizer has gained since the checkpoint.

    Those of a schedule are among them. They are tensors if the learning rate is one.
    """
    known = manifest.tree.get("optimizer", ())
    return [name for name in tensors if name.startswith(OPTIMIZER_OPTIONS) and name.partition(".")[2] not in known]
