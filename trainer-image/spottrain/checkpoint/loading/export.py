"""A committed model in the formats of others: one safetensors file, or a folder as Hugging Face's loaders want it, or
PEFT's.

Nothing of a cluster or a process group is needed, and every byte is verified on its way. The whole model is in
memory for a moment; optimizer state is not read.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from spottrain.checkpoint.errors import CheckpointMismatch, ExportFailed
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.dcp import load_tensors
from spottrain.checkpoint.format.manifest import DTYPES, Manifest, read_manifest
from spottrain.checkpoint.format.part_reader import PartReader
from spottrain.checkpoint.stores.storage import CheckpointStorage

MODEL = "model."
SUFFIX = ".safetensors"


def export(storage: CheckpointStorage, commit: Commit, output: Path) -> list[Path]:
    """Write the model of `commit` to `output`: a file if that ends in .safetensors, else a folder with
    model.safetensors and, where the script's model has a Hugging Face configuration, config.json. Of a PEFT model a
    folder has the adapters alone, as PEFT saves them: adapter_model.safetensors and adapter_config.json.

    Returns the files written. Raises CorruptCheckpoint, CheckpointMismatch where there is no model, and ExportFailed.
    """
    manifest = read_manifest(storage, commit)
    is_file = output.suffix == SUFFIX
    with _sentences(output):  # before the model is read, which may take long
        (output.parent if is_file else output).mkdir(parents=True, exist_ok=True)
        if is_file and output.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
    note = {"format": "pt", "spottrain_step": str(commit.step)}
    if not is_file and (adapters := _peft(manifest)):
        return _export_adapters(storage, commit, manifest, adapters, output, note)
    tensors = _read_model(storage, commit, manifest)
    with _sentences(output):
        if is_file:
            return [_save(tensors, output, note)]
        written = [_save(tensors, output / f"model{SUFFIX}", note)]
        config = _model_config(manifest)
        if config is not None:
            written.append(_write_json(config, output / "config.json"))
        return written


def _export_adapters(
    storage: CheckpointStorage,
    commit: Commit,
    manifest: Manifest,
    adapters: dict[str, Any],
    output: Path,
    note: dict[str, str],
) -> list[Path]:
    """As PEFT's save_pretrained: the adapter "default" in the folder itself, others in folders by their names."""
    written = []
    for name, adapter in adapters.items():
        folder = output if name == "default" else output / name
        named = {own: theirs for theirs, own in adapter["tensors"].items()}
        tensors = {named[own]: tensor for own, tensor in _read_model(storage, commit, manifest, only=named).items()}
        with _sentences(output):
            folder.mkdir(exist_ok=True)
            written.append(_save(tensors, folder / f"adapter_model{SUFFIX}", note))
            written.append(_write_json(adapter["config"], folder / "adapter_config.json"))
    return written


def _peft(manifest: Manifest) -> dict[str, Any]:
    """What the commit knows of a PEFT model's adapters; empty for other models. Raises ExportFailed where it doesn't
    know enough of one."""
    extra = codec.decode(manifest.extra)
    adapters: dict[str, Any] = extra.get("peft") or {}
    if any(Path(name).name != name for name in adapters):
        raise ExportFailed(f"The commit has adapters whose names are no names of folders: {', '.join(adapters)}.")
    is_unknown = not adapters and any(name.startswith(f"{MODEL}base_model.model.") for name in manifest.tensors)
    if is_unknown or any(adapter["tensors"] is None for adapter in adapters.values()):
        raise ExportFailed(
            "The model is one of PEFT, and the commit doesn't say which tensors make its adapters, as it is older or "
            "PEFT computes them when it saves. Export to a file that ends in .safetensors, load that into the model "
            "as the script makes it, and call its save_pretrained."
        )
    return adapters


def _model_config(manifest: Manifest) -> dict[str, Any] | None:
    """The configuration that the model had as `model.config`, as for Hugging Face's models; None without one."""
    extra = codec.decode(manifest.extra)
    config = extra.get("model_config") if isinstance(extra, dict) else None
    return config if isinstance(config, dict) else None


def _read_model(
    storage: CheckpointStorage, commit: Commit, manifest: Manifest, only: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    stored = {
        fqn: tensor
        for fqn, tensor in manifest.tensors.items()
        if fqn.startswith(MODEL) and (only is None or fqn.removeprefix(MODEL) in only)
    }
    if not stored:
        raise CheckpointMismatch(f"The checkpoint at step {commit.step} holds no tensor of a model.")
    tensors = {fqn: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype]) for fqn, tensor in stored.items()}
    parts = PartReader(storage, commit.attempt, manifest)
    load_tensors(tensors, manifest.model_copy(update={"tensors": stored}), parts)
    return {fqn.removeprefix(MODEL): tensor for fqn, tensor in tensors.items()}


def _write_json(value: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(value, indent=2) + "\n")
    return path


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
