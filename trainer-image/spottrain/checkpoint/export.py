"""A committed model in the formats of others: one safetensors file, or a folder as Hugging Face's loaders want it.

Nothing of a cluster or a process group is needed, and every byte is verified on its way. The whole model is in
memory for a moment; optimizer state is not read.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from spottrain.checkpoint import codec
from spottrain.checkpoint.blocks import PartReader
from spottrain.checkpoint.commits import Commit
from spottrain.checkpoint.dcp import load_tensors
from spottrain.checkpoint.errors import CheckpointMismatch, ExportFailed
from spottrain.checkpoint.manifest import DTYPES, Manifest, read_manifest
from spottrain.checkpoint.storage import CheckpointStorage

MODEL = "model."
SUFFIX = ".safetensors"


def export(storage: CheckpointStorage, commit: Commit, output: Path) -> list[Path]:
    """Write the model of `commit` to `output`: a file if that ends in .safetensors, else a folder with
    model.safetensors and, where the script's model has a Hugging Face configuration, config.json.

    Returns the files written. Raises CorruptCheckpoint, CheckpointMismatch where there is no model, and ExportFailed.
    """
    manifest = read_manifest(storage, commit)
    is_file = output.suffix == SUFFIX
    with _sentences(output):  # before the model is read, which may take long
        (output.parent if is_file else output).mkdir(parents=True, exist_ok=True)
        if is_file and output.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
    tensors = _read_model(storage, commit, manifest)
    note = {"format": "pt", "spottrain_step": str(commit.step)}
    with _sentences(output):
        if is_file:
            return [_save(tensors, output, note)]
        written = [_save(tensors, output / f"model{SUFFIX}", note)]
        config = model_config(manifest)
        if config is not None:
            path = output / "config.json"
            path.write_text(json.dumps(config, indent=2) + "\n")
            written.append(path)
        return written


def model_config(manifest: Manifest) -> dict[str, Any] | None:
    """The configuration that the model had as `model.config`, as for Hugging Face's models; None without one."""
    extra = codec.join(manifest.extra, {})
    config = extra.get("model_config") if isinstance(extra, dict) else None
    return config if isinstance(config, dict) else None


def _read_model(storage: CheckpointStorage, commit: Commit, manifest: Manifest) -> dict[str, torch.Tensor]:
    stored = {fqn: tensor for fqn, tensor in manifest.tensors.items() if fqn.startswith(MODEL)}
    if not stored:
        raise CheckpointMismatch(f"The checkpoint at step {commit.step} holds no tensor of a model.")
    tensors = {fqn: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype]) for fqn, tensor in stored.items()}
    parts = PartReader(storage, commit.attempt, manifest)
    load_tensors(tensors, manifest.model_copy(update={"tensors": stored}), parts)
    return {fqn.removeprefix(MODEL): tensor for fqn, tensor in tensors.items()}


def _save(tensors: dict[str, torch.Tensor], path: Path, note: dict[str, str]) -> Path:
    """A reader never sees half a file."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(tensors, unfinished, metadata=note)
        unfinished.chmod(mode)  # safetensors lets nobody else read what it writes
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


@contextmanager
def _sentences(output: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ExportFailed(
            f"The model could not be written to {output}: {why}. Make room there, or name another place."
        ) from error
