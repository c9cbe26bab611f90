"""Documents of different lengths, packed to a context length.

Documents are laid in a row, which is cut after every `context` tokens. So no token is left out, and only the end of
the row is padded. A document that is cut counts as two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from spottrain.data.items import MapDataset
from spottrain.data.order import Indices
from spottrain.data.streams.opened import HasState, OpenStream

IGNORED = -100
"""Label of a token whose next one is unknown, as torch's cross entropy leaves it out."""
Pack = dict[str, torch.Tensor]
# Tokens of a document that a commit may hold, for each stream of a rank. If more are left, no state is taken.
_LARGEST_REST = 8192


def packed(documents: Iterable[Any], *, context: int, pad: int = 0) -> Iterator[Pack]:
    """Pack a stream of documents, in a `make_stream` of `Streams`.

    If `documents` or its iterator has a state, so has what this returns: that state, and the rest of the document
    that was cut.

    Args:
        documents: Token ids of each document: lists, arrays or tensors of one dimension.
        context: Tokens of a pack.
        pad: Token id at the end of the last pack.

    Returns:
        Packs: `tokens` (context,); `positions` (context,) in each document; `documents` (context,), the number of the
        document in the pack, -1 for padding; `labels` (context,), the next token of the document, or `IGNORED`.

    Raises:
        ValueError: `context` is below 1.

    Example:
        >>> from spottrain.data import packed
        >>> first, second = packed([[1, 2, 3], [4, 5]], context=4)
        >>> first["tokens"].tolist(), first["documents"].tolist(), first["labels"].tolist()
        ([1, 2, 3, 4], [0, 0, 0, 1], [2, 3, -100, -100])
        >>> second["tokens"].tolist(), second["documents"].tolist()
        ([5, 0, 0, 0], [0, -1, -1, -1])
    """
    _check(context)
    opened = OpenStream(documents)
    if opened.stateful is None:
        return _Packs(opened, context, pad)
    return _PacksWithState(opened, context, pad, opened.stateful)


class PackedDocuments:
    """Documents with an index, packed to a context length. A data set with items by index: packs, as of `packed`.

    The documents are laid in a row in their own order. Their lengths are needed, to find a pack without reading those
    before it.
    """

    def __init__(
        self, documents: MapDataset, *, lengths: Sequence[int] | Indices, context: int, pad: int = 0
    ) -> None:
        """Add up the lengths.

        Args:
            documents: Token ids of each document, by index.
            lengths: Tokens of each document.
            context: Tokens of a pack.
            pad: Token id at the end of the last pack.

        Raises:
            ValueError: `context` or the lengths can't be used.
        """
        _check(context)
        if len(lengths) != len(documents):
            raise ValueError(
                f"lengths has {len(lengths)} numbers, and there are {len(documents)} documents; pass all"
            )
        self._documents = documents
        self._context = context
        self._pad = pad
        self._ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        if len(lengths) and np.min(lengths) < 0:
            raise ValueError(f"the length of document {int(np.argmin(lengths))} is below 0")

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // self._context) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Pack:
        """The pack. Raises IndexError if there is none, and ValueError for a document of another length."""
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        begin = index * self._context
        stop = min(begin + self._context, int(self._ends[-1]))
        first, last = np.searchsorted(self._ends, [begin, stop - 1], side="right").tolist()
        pieces = [self._piece(number, begin, stop) for number in range(first, last + 1)]
        return _pack([piece for piece in pieces if len(piece)], self._context, self._pad)

    def _piece(self, number: int, begin: int, stop: int) -> Indices:
        """What of a document lies between two places of the row."""
        end = int(self._ends[number])
        start = int(self._ends[number - 1]) if number else 0
        if start == end:
            return np.empty(0, np.int64)
        tokens = _tokens(self._documents[number], f"document {number}")
        if len(tokens) != end - start:
            raise ValueError(
                f"document {number} has {len(tokens)} tokens, and lengths says {end - start}; correct it"
            )
        return tokens[max(0, begin - start) : stop - start]


def causal_mask(documents: torch.Tensor) -> torch.Tensor:
    """Which tokens attend to which: those of the same document before, and each to itself.

    Args:
        documents: Of a batch of packs; shape `(batch, context)`.

    Returns:
        True where attention is allowed, as `scaled_dot_product_attention` takes it; shape
        `(batch, 1, context, context)`.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


class _Packs(Iterator[Pack]):
    """Packs of a stream. `rest` are the tokens of the document that was cut, if any."""

    def __init__(self, documents: OpenStream, context: int, pad: int) -> None:
        self._documents = documents
        self._context = context
        self._pad = pad
        self._rest = np.empty(0, np.int64)

    def __next__(self) -> Pack:
        pieces: list[Indices] = []
        room = self._context
        while room:
            if not len(self._rest):
                document = next(self._documents, None)
                if document is None:
                    break
                self._rest = _tokens(document, "a document of the stream")
            piece, self._rest = self._rest[:room], self._rest[room:]
            if len(piece):
                pieces.append(piece)
                room -= len(piece)
        if not pieces:
            raise StopIteration
        return _pack(pieces, self._context, self._pad)


class _PacksWithState(_Packs):
    """Packs of a stream that has a state."""

    def __init__(self, documents: OpenStream, context: int, pad: int, stateful: HasState) -> None:
        super().__init__(documents, context, pad)
        self._stateful = stateful

    def state_dict(self) -> dict[str, Any] | None:
        if len(self._rest) > _LARGEST_REST or (documents := self._stateful.state_dict()) is None:
            return None
        return {"documents": documents, "rest": self._rest.astype(np.int32)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._stateful.load_state_dict(state_dict["documents"])
        self._rest = state_dict["rest"].astype(np.int64)


def _pack(pieces: Sequence[Indices], context: int, pad: int) -> Pack:
    pack = {
        "tokens": torch.full((context,), pad),
        "positions": torch.zeros(context, dtype=torch.int64),
        "documents": torch.full((context,), -1),
        "labels": torch.full((context,), IGNORED),
    }
    begin = 0
    for number, piece in enumerate(pieces):
        stop = begin + len(piece)
        pack["tokens"][begin:stop] = torch.from_numpy(piece)
        pack["positions"][begin:stop] = torch.arange(len(piece))
        pack["documents"][begin:stop] = number
        pack["labels"][begin : stop - 1] = torch.from_numpy(piece[1:])
        begin = stop
    return pack


def _tokens(document: Any, what: str) -> Indices:
    tokens = np.asarray(document)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise ValueError(
            f"{what} is no row of token ids: {type(document).__name__} of shape {tokens.shape}, {tokens.dtype}; "
            "tokenize it, and pass a list, an array or a tensor of whole numbers"
        )
    return tokens.astype(np.int64)


def _check(context: int) -> None:
    if context < 1:
        raise ValueError(f"context is {context}, and a pack has one token at least")
