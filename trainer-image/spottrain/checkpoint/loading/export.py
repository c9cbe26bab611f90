"""Export of a committed model.

It goes to one safetensors file, or to a folder for Hugging Face's loaders or for PEFT. An export needs no cluster and
no process group, and verifies every byte. The whole model is in memory for a moment. Optimizer state is not read.
"""

from __future__ import annotations

import errno
import json
import math
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
from spottrain_planner.memory_estimate import in_gib

MODEL = "model."
SUFFIX = ".safetensors"
# The only type of a commit's tensors that safetensors files can't hold.
_NOT_IN_FILES = str(torch.complex128).removeprefix("torch.")


def export(storage: CheckpointStorage, commit: Commit, output: Path) -> list[Path]:
    """Write the model of `commit` to `output`.

    Args:
        storage: The store that holds the commit.
        commit: What to export.
        output: A file, if its name ends in .safetensors. Otherwise a folder for model.safetensors and, if the
            script's model has a Hugging Face configuration, config.json. The folder of a PEFT model holds only the
            adapters, as PEFT saves them: adapter_model.safetensors and adapter_config.json.

    Returns:
        The files that were written.

    Raises:
        CorruptCheckpoint: Bytes of the commit are damaged.
        CheckpointMismatch: The commit holds no model.
        ExportFailed: The model could not be written or doesn't fit in memory, safetensors files can't hold one of its
            tensors, or the commit doesn't know enough of its adapters.
    """
    manifest = read_manifest(storage, commit)
    is_file = output.suffix == SUFFIX
    with _sentences(output):  # before the model is read, which may take a while
        (output.parent if is_file else output).mkdir(parents=True, exist_ok=True)
        if is_file and output.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
    # One key alone: safetensors writes several in random order, and two exports of a commit would differ.
    note = {"format": "pt"}
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
    """Write what PEFT's save_pretrained writes.

    The adapter "default" goes into the folder, and others go into folders by name.
    """
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
    """What the commit holds about a PEFT model's adapters.

    Empty for other models. Raises ExportFailed if it holds too little.
    """
    extra = codec.decode(manifest.extra)
    adapters: dict[str, Any] = extra.get("peft") or {}
    if unfit := [name for name in adapters if name in ("", ".", "..") or {"/", "\0"} & set(name)]:
        raise ExportFailed(
            f"The commit has adapters whose names can't be names of folders: {', '.join(map(repr, unfit))}."
        )
    is_unknown = not adapters and any(name.startswith(f"{MODEL}base_model.model.") for name in manifest.tensors)
    if is_unknown or not all(_names_its_tensors(adapter, manifest) for adapter in adapters.values()):
        raise ExportFailed(
            "This is a PEFT model, and the commit doesn't say which tensors are its adapters, because PEFT computes "
            "them when it saves. Export to a file that ends in .safetensors, load it into the model that the script "
            "builds, and call that model's save_pretrained."
        )
    return adapters


def _names_its_tensors(adapter: dict[str, Any], manifest: Manifest) -> bool:
    names = adapter["tensors"]
    return names is not None and all(f"{MODEL}{name}" in manifest.tensors for name in names.values())


def _model_config(manifest: Manifest) -> dict[str, Any] | None:
    """The configuration that the model had as `model.config`; None without one. Hugging Face's models have one."""
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
    if unfit := [fqn.removeprefix(MODEL) for fqn, tensor in stored.items() if tensor.dtype == _NOT_IN_FILES]:
        raise ExportFailed(
            f"safetensors files can't hold tensors of {_NOT_IN_FILES}, and the model has some: {', '.join(unfit)}. "
            "Store each as a real tensor (torch.view_as_real), or register it as a buffer with persistent=False."
        )
    try:
        tensors = {fqn: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype]) for fqn, tensor in stored.items()}
    except (RuntimeError, MemoryError) as error:  # torch raises the first
        needed = sum(math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize for tensor in stored.values())
        raise ExportFailed(
            f"The model needs {in_gib(needed)} of memory, which this process can't get. Export it on a larger "
            "machine."
        ) from error
    parts = PartReader(storage, commit.attempt, manifest)
    load_tensors(tensors, manifest.model_copy(update={"tensors": stored}), parts)
    return {fqn.removeprefix(MODEL): tensor for fqn, tensor in tensors.items()}


def _write_json(value: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(value, indent=2) + "\n")
    return path


def _save(tensors: dict[str, torch.Tensor], path: Path, note: dict[str, str]) -> Path:
    """Write under a temporary name, and rename: a reader never sees half a file."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(tensors, unfinished, metadata=note)
        unfinished.chmod(mode)  # safetensors makes its files readable to the owner alone
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
            f"The model could not be written to {output}: {why}. Free space there, or choose a different place."
        ) from error
