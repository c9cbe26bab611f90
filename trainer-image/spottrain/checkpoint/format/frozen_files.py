"""Files of frozen weights, to which several commits refer.

The first save writes the weights that the script doesn't train to files of their own (`rank-00000.frozen.data`) in
its attempt. Later manifests name these files, with sizes and checksums, instead of new ones. A manifest still has the
place of every tensor. HEAD names the attempts that a commit needs besides its own, so that clean-up leaves their
frozen weights where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from spottrain.checkpoint.errors import FrozenWeightsGone
from spottrain.checkpoint.format.manifest import FrozenFile, Manifest, Receipt, Tensor, index_tensors
from spottrain.checkpoint.stores.storage import CheckpointStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenFiles:
    """Tensors that are stored, and the files that hold them.

    Attributes:
        tensors: The tensors by name, whose chunks hold the number of a file in `files`.
    """

    files: tuple[FrozenFile, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> FrozenFiles:
        """The frozen weights that a commit refers to."""
        first = manifest.world_size
        numbers = {first + index: index for index in range(len(manifest.shared))}
        tensors = {
            name: _renumbered(tensor, numbers)
            for name, tensor in manifest.tensors.items()
            if tensor.chunks and all(chunk.rank in numbers for chunk in tensor.chunks)
        }
        return cls(files=manifest.shared, tensors=tensors)

    @classmethod
    def written(cls, prefix: str, receipts: Sequence[Receipt]) -> FrozenFiles:
        """The frozen weights that the ranks have written in the attempt at `prefix`. Raises CorruptCheckpoint."""
        files = [FrozenFile(attempt=prefix, rank=r.rank, file=r.frozen) for r in receipts if r.frozen is not None]
        numbers = {file.rank: index for index, file in enumerate(files)}
        tensors = index_tensors(entry for receipt in receipts for entry in receipt.frozen_entries)
        return cls(files=tuple(files), tensors={name: _renumbered(t, numbers) for name, t in tensors.items()})

    def only(self, names: Collection[str]) -> FrozenFiles:
        """These tensors, and the files that they need."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name in names}
        used = sorted({chunk.rank for tensor in tensors.values() for chunk in tensor.chunks})
        numbers = {number: index for index, number in enumerate(used)}
        return FrozenFiles(
            files=tuple(self.files[number] for number in used),
            tensors={name: _renumbered(tensor, numbers) for name, tensor in tensors.items()},
        )

    def joined(self, other: FrozenFiles) -> FrozenFiles:
        return FrozenFiles(files=self.files + other.files, tensors={**self.tensors, **other.beyond(len(self.files))})

    def beyond(self, first: int) -> dict[str, Tensor]:
        """The tensors, with the numbers of their files counted from `first`."""
        numbers = {index: first + index for index in range(len(self.files))}
        return {name: _renumbered(tensor, numbers) for name, tensor in self.tensors.items()}

    def check(self, storage: CheckpointStorage) -> None:
        """Check that the store holds every file, with its size. Raises FrozenWeightsGone."""
        for prefix in {file.attempt for file in self.files}:
            sizes = dict(storage.list(prefix))
            for file in self.files:
                if file.attempt == prefix and sizes.get(file.key) != file.file.size:
                    raise FrozenWeightsGone(
                        f"{file.key}, which holds frozen weights of the newest commits, is missing or cut short in "
                        "the checkpoint store. The next save writes them again. Find out who else deletes objects "
                        "there."
                    )


def _renumbered(tensor: Tensor, numbers: Mapping[int, int]) -> Tensor:
    chunks = tuple(chunk.model_copy(update={"rank": numbers[chunk.rank]}) for chunk in tensor.chunks)
    return tensor.model_copy(update={"chunks": chunks})
