"""Documents packed to a context length: each token once, each document apart, and exact resumes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from spottrain.data import PackedDocuments, Streams, causal_mask, packed
from spottrain.data.packing import IGNORED, Pack
from spottrain.data.streams.cursor import Mark, StreamCursor
from stream_worlds import GLOBAL_BATCH, LAST, RESIZED, WithState, data_of, generate, mark_everywhere

DOCUMENTS = st.lists(st.lists(st.integers(1, 99), max_size=9), max_size=12)


def documents_in(packs: list[Pack]) -> list[list[int]]:
    """The pieces of documents in packs, as their labels continue them."""
    found = []
    for pack in packs:
        for number in range(int(pack["documents"].max()) + 1):
            chosen = pack["documents"] == number
            tokens, labels = pack["tokens"][chosen].tolist(), pack["labels"][chosen].tolist()
            assert labels == [*tokens[1:], IGNORED]
            assert pack["positions"][chosen].tolist() == list(range(len(tokens)))
            found.append(tokens)
    return found


@given(DOCUMENTS, st.integers(1, 7))
def test_each_token_is_in_one_pack_and_only_the_last_is_padded(documents: list[list[int]], context: int) -> None:
    packs = list(packed(documents, context=context))
    row = [token for document in documents for token in document]
    assert [token for piece in documents_in(packs) for token in piece] == row
    assert all((pack["documents"] >= 0).all() for pack in packs[:-1])
    assert all(len(pack["tokens"]) == context for pack in packs)
    for pack in packs:
        padding = pack["documents"] == -1
        assert (pack["tokens"][padding] == 0).all()
        assert (pack["labels"][padding] == IGNORED).all()


@given(DOCUMENTS, st.integers(1, 7))
def test_documents_with_an_index_are_packed_as_a_stream_of_them(documents: list[list[int]], context: int) -> None:
    data = PackedDocuments(documents, lengths=list(map(len, documents)), context=context)
    found = [data[index] for index in range(len(data))]
    for one, other in zip(found, packed(documents, context=context), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_document_in_a_pack_attends_to_itself_alone() -> None:
    documents = [[1, 2, 3], [4, 5], [6]]
    [pack] = packed(documents, context=8)
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, 8, 4, generator=generator)
    mask = causal_mask(pack["documents"][None])
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert mask.shape == (1, 1, 8, 8)
    for begin, stop in ((0, 3), (3, 5), (5, 6)):
        own_query, own_key, own_value = (each[:, :, begin:stop] for each in (query, key, value))
        alone = scaled_dot_product_attention(own_query, own_key, own_value, is_causal=True)
        torch.testing.assert_close(found[:, :, begin:stop], alone)
    assert found.isfinite().all()


class Documents(WithState):
    """Documents of different lengths, with a state."""

    def __iter__(self) -> Iterator[Any]:
        for stream, number, item in super().__iter__():
            yield [100 * stream + number + place for place in range(1 + 7 * item % 11)]


@pytest.mark.parametrize("with_state", [False, True])
def test_packs_of_streams_resume_exactly(with_state: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_everywhere(monkeypatch)

    def make(stream: int, number: int) -> Iterator[list[int]]:
        documents = Documents(stream, number)
        for pack in packed(documents if with_state else iter(documents), context=4):
            yield pack["tokens"].tolist()

    def make_with_state(stream: int, number: int) -> Any:
        return packed(Documents(stream, number), context=4)

    streams = Streams(make_with_state if with_state else make, streams=5)
    order = streams.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    steady = generate(data_of(Streams(make, streams=5)), order, [(1, LAST)], tmp_path / "steady")
    Documents.num_read = WithState.num_read = 0
    resized = generate(data_of(streams), order, [(6, 5), (4, 11), (3, 12), (6, LAST)], tmp_path / "resized")
    if with_state:
        resized = [[pack["tokens"].tolist() for pack in step] for step in resized]
    assert resized == steady


class Books(WithState):
    """Documents that are longer than what a commit holds of one."""

    def __iter__(self) -> Iterator[Any]:
        for stream, number, item in super().__iter__():
            yield np.arange(9000 * (item % 3), dtype=np.int64) + stream + number


def test_a_document_of_any_length_is_packed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_everywhere(monkeypatch)
    streams = Streams(lambda *which: packed(Books(*which), context=1000), streams=5)
    order = streams.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    steady = generate(data_of(streams), order, [(1, LAST)], tmp_path / "steady")
    resized = generate(data_of(streams), order, RESIZED, tmp_path / "resized")
    assert [[pack["tokens"][0].item() for pack in step] for step in resized] == [
        [pack["tokens"][0].item() for pack in step] for step in steady
    ]
    seconds = itertools.count()
    found = StreamCursor(
        streams.make_stream, 1, Mark(), name="", seed=lambda _: None, now=lambda: float(next(seconds))
    )
    found.skip_to(60)
    states = [json.loads(mark.state) for mark in found.pop_marks() if mark.state is not None]
    assert 10 < len(states) < 60
    assert max(len(json.dumps(state)) for state in states) < 50_000


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: packed([], context=0), "context is 0"),
        (lambda: next(packed(["text"], context=4)), "a document of the stream is no row of token ids: str"),
        (lambda: next(packed([[0.5]], context=4)), r"list of shape \(1,\), float64"),
        (
            lambda: PackedDocuments([[1]], lengths=[1, 2], context=4),
            "lengths has 2 numbers, and there are 1 documents",
        ),
        (lambda: PackedDocuments([[1]], lengths=[-1], context=4), "the length of document 0 is below 0"),
        (lambda: PackedDocuments([[1, 2]], lengths=[3], context=4)[0], "document 0 has 2 tokens, and lengths says 3"),
    ],
)
def test_what_can_not_be_packed_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_there_is_no_pack_beyond_the_last() -> None:
    data = PackedDocuments([np.arange(3), torch.arange(2)], lengths=[3, 2], context=4)
    assert len(data) == 2
    with pytest.raises(IndexError):
        data[2]
    assert len(PackedDocuments([], lengths=[], context=4)) == 0
