"""The cache of one kind of objects.

No older answer replaces a newer object, in whatever order they arrive.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from spottrain_operator.kube.cache import Change, ObjectCache
from spottrain_operator.kube.cluster import Listing, WatchEvent
from spottrain_operator.kube.resources import Manifest

KEY = ("team", "gpt-1")


def pod(version: int, name: str = "gpt-1", uid: str = "u1", **fields: Any) -> Manifest:
    meta = {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": meta, **fields}


def shown(version: int, *, deleted: bool = False, **fields: Any) -> WatchEvent:
    return WatchEvent(object=pod(version, **fields), version=version, deleted=deleted)


def bookmark(version: int) -> WatchEvent:
    return WatchEvent(object=None, version=version)


class Kept:
    """A cache, and what it has told."""

    def __init__(self, *, ordered: bool = True) -> None:
        self.changes: list[Change] = []
        self.cache = ObjectCache(
            trim=lambda item: {key: value for key, value in item.items() if key != "noise"},
            index=lambda item: [("node", item["node"])] if "node" in item else [],
            on_change=self.changes.append,
            ordered=ordered,
        )

    @property
    def version(self) -> int | None:
        found = self.cache.get(KEY)
        return None if found is None else int(found["metadata"]["resourceVersion"])


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_an_own_write_is_read_before_the_watch_shows_it(kept: Kept) -> None:
    kept.cache.apply(shown(5, phase="Pending"))
    kept.cache.written(pod(9, phase="Running"))
    assert kept.version == 9
    kept.cache.apply(shown(7, phase="Failed"))
    found = kept.cache.get(KEY)
    assert found is not None
    assert found["phase"] == "Running", "an event from before the write changes nothing"


def test_the_echo_of_an_own_write_wakes_nobody(kept: Kept) -> None:
    kept.cache.written(pod(9, phase="Running"), report=False)
    kept.cache.apply(shown(9, phase="Running"))
    assert kept.changes == []


def test_the_late_answer_to_a_write_brings_nothing_back(kept: Kept) -> None:
    """The watch shows a later deletion before the answer to the write arrives."""
    kept.cache.apply(shown(5))
    kept.cache.apply(shown(10, deleted=True))
    kept.cache.written(pod(9))
    assert kept.version is None


def test_a_bookmark_counts_as_shown(kept: Kept) -> None:
    kept.cache.apply(bookmark(20))
    kept.cache.written(pod(9))
    assert kept.version is None, "the watch has shown everything up to 20, and this object isn't there"


def test_what_was_deleted_at_once_is_gone_at_once(kept: Kept) -> None:
    kept.cache.apply(shown(5))
    kept.cache.deleted(KEY, "u1")
    assert kept.version is None
    kept.cache.apply(shown(8))
    assert kept.version is None, "an event from before the deletion"
    kept.cache.apply(shown(9, deleted=True))
    kept.cache.apply(shown(12, uid="u2"))
    assert kept.version == 12, "another pod of this name"


def test_a_deletion_that_is_known_already_removes_no_newer_object(kept: Kept) -> None:
    kept.cache.apply(shown(12, uid="u2"))
    kept.cache.deleted(KEY, "u1")
    assert kept.version == 12
    kept.cache.apply(shown(14, uid="u2"))
    assert kept.version == 14


def test_a_new_list_removes_what_it_lacks_but_no_newer_write(kept: Kept) -> None:
    kept.cache.apply(shown(5))
    kept.cache.apply(WatchEvent(object=pod(6, name="gpt-2"), version=6))
    kept.cache.written(pod(30, name="gpt-3"))
    kept.cache.replace_all(Listing(items=(pod(20, name="gpt-2"),), version=25))
    assert [each["metadata"]["name"] for each in kept.cache.all()] == ["gpt-2", "gpt-3"]


def test_a_list_of_some_removes_only_those_that_it_is_about(kept: Kept) -> None:
    kept.cache.apply(shown(5, node="a"))
    kept.cache.apply(WatchEvent(object=pod(6, name="gpt-2", node="b"), version=6))
    kept.cache.read(("node", "a"), Listing(items=(), version=9))
    assert [each["metadata"]["name"] for each in kept.cache.all()] == ["gpt-2"]
    kept.cache.apply(shown(8, node="a"))
    assert kept.version is None, "the list was newer"


def test_only_what_is_kept_counts_as_a_change(kept: Kept) -> None:
    kept.cache.apply(shown(5, phase="Running", noise=1))
    kept.cache.apply(shown(6, phase="Running", noise=2))
    assert len(kept.changes) == 1
    assert kept.version == 6, "it is the newer object all the same"
    kept.cache.apply(shown(7, phase="Failed"))
    before, after = kept.changes[-1].before, kept.changes[-1].after
    assert (before or {})["phase"] == "Running"
    assert (after or {})["phase"] == "Failed"


def test_a_reader_may_change_what_it_gets(kept: Kept) -> None:
    kept.cache.apply(shown(5, labels={"a": "1"}))
    found = kept.cache.get(KEY)
    assert found is not None
    found["labels"]["a"] = "2"
    assert (kept.cache.get(KEY) or {})["labels"] == {"a": "1"}


def test_an_object_is_found_by_where_it_is_now(kept: Kept) -> None:
    kept.cache.apply(shown(5))
    assert kept.cache.found_by(("node", "a")) == []
    kept.cache.apply(shown(6, node="a"))
    kept.cache.apply(shown(7, node="b"))
    assert kept.cache.found_by(("node", "a")) == []
    assert [each["node"] for each in kept.cache.found_by(("node", "b"))] == ["b"]
    kept.cache.apply(shown(8, node="b", deleted=True))
    assert kept.cache.found_by(("node", "b")) == []
    assert list(kept.cache.indices) == []


class Race:
    """The life of one name, and a cache that hears of it.

    It hears in three ways, each late in its own manner.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.kept = Kept()
        self.lives: list[str | None] = [None]  # the uid of the object at each version
        self.answer: int | None = None  # the version of the own write whose answer is on its way
        self.newest = self.position = 0

    def happen(self) -> None:
        version, before = len(self.lives), self.lives[-1]
        self.lives.append(f"u{version}" if before is None else before if self.chance.random() < 0.7 else None)
        if self.chance.random() < 0.5 and version > self.newest:
            self.answer = version

    def at(self, version: int) -> Manifest:
        return pod(version, uid=self.lives[version] or str(self.lives[version - 1]))

    def show_answer(self) -> None:
        version, self.answer = self.answer, None
        if version is None:
            return
        if self.lives[version] is not None:
            self.kept.cache.written(self.at(version))
        elif (self.kept.cache.get(KEY) or pod(0, uid=""))["metadata"]["uid"] == self.lives[version - 1]:
            self.kept.cache.deleted(KEY, str(self.lives[version - 1]))
        else:
            return  # nobody deletes what he doesn't see
        self.newest = max(self.newest, version)

    def show_list(self) -> None:
        self.position = self.chance.randrange(self.position, len(self.lives))
        items = (self.at(self.position),) if self.lives[self.position] else ()
        self.kept.cache.replace_all(Listing(items=items, version=self.position))

    def show_event(self) -> None:
        if self.position + 1 < len(self.lives):
            self.position += 1
            deleted = self.lives[self.position] is None
            self.kept.cache.apply(WatchEvent(object=self.at(self.position), version=self.position, deleted=deleted))


@pytest.mark.parametrize("seed", range(300))
def test_in_any_order_the_newest_wins(seed: int) -> None:
    """What the cache shows is never older than the newest that it was shown.

    The oracle is the history.
    """
    race = Race(seed)
    for _ in range(40):
        race.happen()
        for _ in range(race.chance.randrange(3)):
            race.chance.choice([race.show_answer, race.show_list, race.show_event])()
            race.newest = max(race.newest, race.position)
            assert race.kept.version == (race.newest if race.lives[race.newest] else None), race.lives


def test_without_an_order_a_later_event_of_another_object_hides_no_own_write() -> None:
    kept = Kept(ordered=False)
    kept.cache.apply(shown(5, phase="Pending"))
    kept.cache.apply(shown(10, name="gpt-2", uid="u2"))
    kept.cache.written(pod(9, phase="Running"))
    assert kept.version == 9


def test_without_an_order_a_late_answer_does_not_bring_a_deleted_object_back() -> None:
    kept = Kept(ordered=False)
    kept.cache.apply(shown(5))
    kept.cache.apply(shown(8, deleted=True))
    kept.cache.written(pod(7))
    kept.cache.written(pod(9))
    assert kept.version is None
    kept.cache.apply(shown(11, uid="u2"))
    assert kept.version == 11, "another object of that name"
