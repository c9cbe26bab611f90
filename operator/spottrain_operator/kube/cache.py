"""The objects of one kind in memory.

The cache shows each object as the newest list, watch event or own write has it.

Versions are compared as numbers, which Kubernetes guarantees within a kind, and which etcd's revisions have always
been. So an older answer never replaces a newer object, in whatever order list, watch and own writes arrive. An object
is kept as compressed JSON text, which takes a small part of the memory of the parsed object. Every reader gets a
separate copy.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from spottrain_operator.kube.cluster import Listing, WatchEvent
from spottrain_operator.kube.json_text import parsed
from spottrain_operator.kube.resources import Manifest

Key = tuple[str, str]
"""Namespace and name. The namespace of a node is empty."""
# An answer comes within seconds of its write.
MAX_GONE = 1000
# zlib's level. Higher ones save little more.
COMPRESSION = 1

Index = tuple[str, ...]
"""What an object is found by, such as ("node", "node-7")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of an object.

    Attributes:
        before: The object before the change. None: it is new.
        after: The object after the change. None: it is gone.
    """

    before: Manifest | None
    after: Manifest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    version: int
    uid: str
    compressed: bytes

    def object(self) -> Manifest:
        found: Manifest = parsed(zlib.decompress(self.compressed))
        found["metadata"]["resourceVersion"] = str(self.version)
        return found


class ObjectCache:
    """The objects of one kind.

    Args:
        trim: Copies of an object the part to keep. Without a change in it, nothing is reported.
        index: What else than its name the trimmed object is found by.
        on_change: Called with each change, after it.
        ordered: Whether the watch shows changes in the order of their versions, or in order for each object alone.
    """

    def __init__(
        self,
        *,
        trim: Callable[[Manifest], Manifest],
        index: Callable[[Manifest], Iterable[Index]] = lambda _: (),
        on_change: Callable[[Change], None] = lambda _: None,
        ordered: bool = True,
    ) -> None:
        self.trim = trim
        self._index = index
        self._on_change = on_change
        self._ordered = ordered
        self._kept: dict[Key, _Kept] = {}
        self._by_index: dict[Index, set[Key]] = {}
        # Objects that are gone, as this process knows before its watch does: their last version here, and their uid,
        # which no other object ever gets.
        self._gone: dict[Key, tuple[int, str]] = {}
        self._shown = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Manifest | None:
        kept = self._kept.get(key)
        return None if kept is None else kept.object()

    def all(self) -> Iterator[Manifest]:
        """The objects that there are now, by name. Each is parsed when its turn comes."""
        return (kept.object() for _, kept in sorted(self._kept.items()))

    def found_by(self, index: Index) -> list[Manifest]:
        """The objects with this index, by name."""
        return [self._kept[key].object() for key in sorted(self._by_index.get(index, ()))]

    @property
    def version(self) -> int:
        """The watch has shown everything up to this version."""
        return self._shown

    @property
    def indices(self) -> Collection[Index]:
        """What objects are found by."""
        return self._by_index.keys()

    # --- what the watch shows -----------------------------------------------------------------------------

    def replace_all(self, listing: Listing) -> None:
        """Take a list of all objects.

        An object that the list lacks is gone, unless it is newer than the list.
        """
        items = tuple(listing.items)
        listed = {_key(item): _uid(item) for item in items}
        for key in self._kept.keys() - listed.keys():
            self._remove(key, listing.version)
        for item in items:
            self._put(item)
        self._gone = {
            key: (version, uid)
            for key, (version, uid) in self._gone.items()
            if version > listing.version or listed.get(key) == uid
        }
        self._shown = max(self._shown, listing.version)

    def apply(self, event: WatchEvent) -> None:
        """Apply the next event of the watch."""
        if event.object is not None:
            if event.deleted:
                self._remove(_key(event.object), event.version)
                self._note_deletion(_key(event.object), event.version, _uid(event.object))
            else:
                self._put(event.object)
        self._shown = max(self._shown, event.version)

    # --- what this process has written, or read by itself ---------------------------------------------------

    def written(self, answer: Manifest, *, report: bool = True) -> None:
        """Take the answer to a write, or to a read of one object, before the watch.

        If `report` is False, nobody learns of the change. If the watch has come this far, it has shown that, and
        perhaps more.
        """
        if not self._ordered or _version(answer) > self._shown:
            self._put(answer, report=report)

    def deleted(self, key: Key, uid: str) -> None:
        """Note that an object is gone, before the watch shows it."""
        kept = self._kept.get(key)
        if kept is not None and kept.uid == uid:
            self._gone[key] = (kept.version, uid)
            self._remove(key, kept.version)

    def read(self, index: Index, listing: Listing) -> None:
        """Take a list of all objects with an index, which was read beside the watch."""
        items = tuple(listing.items)
        listed = {_key(item) for item in items}
        for key in self._by_index.get(index, set()) - listed:
            if self._kept[key].version <= listing.version:
                self.deleted(key, self._kept[key].uid)
        for item in items:
            self.written(item)

    # ------------------------------------------------------------------------------------------------------

    def _put(self, manifest: Manifest, *, report: bool = True) -> None:
        key, version = _key(manifest), _version(manifest)
        old = self._kept.get(key)
        gone_version, gone_uid = self._gone.get(key, (0, ""))
        if version <= max(old.version if old is not None else 0, gone_version) or _uid(manifest) == gone_uid:
            return
        trimmed = self.trim(manifest)
        trimmed["metadata"].pop("resourceVersion", None)
        text = json.dumps(trimmed, separators=(",", ":"), sort_keys=True)
        new = _Kept(version=version, uid=_uid(manifest), compressed=zlib.compress(text.encode(), COMPRESSION))
        if old is not None and old.compressed == new.compressed:
            self._kept[key] = new
            return
        before = old.object() if old is not None else None
        self._kept[key] = new
        self._move(key, before, trimmed)
        if report:
            self._on_change(Change(before=before, after=new.object()))

    def _remove(self, key: Key, version: int) -> None:
        old = self._kept.get(key)
        if old is not None and old.version <= version:
            before = old.object()
            del self._kept[key]
            self._move(key, before, None)
            self._on_change(Change(before=before, after=None))

    def _note_deletion(self, key: Key, version: int, uid: str) -> None:
        """Forget an object that is gone.

        If versions prove nothing, an answer to a write may still come. Then keep a note of the deletion.
        """
        if not self._ordered:
            self._gone.pop(key, None)
            self._gone[key] = (version, uid)
            for oldest in list(self._gone)[:-MAX_GONE]:
                del self._gone[oldest]
        elif self._gone.get(key, (0, ""))[1] == uid:
            del self._gone[key]

    def _move(self, key: Key, old: Manifest | None, new: Manifest | None) -> None:
        """Let the object be found by what it is found by now.

        Its indices are made anew each time: kept, they would take as much memory as the object.
        """
        before = set(self._index(old)) if old is not None else set()
        after = set(self._index(new)) if new is not None else set()
        for index in before - after:
            self._by_index[index].discard(key)
            if not self._by_index[index]:
                del self._by_index[index]
        for index in after - before:
            self._by_index.setdefault(index, set()).add(key)


def _key(manifest: Manifest) -> Key:
    meta = manifest["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _version(manifest: Manifest) -> int:
    return int(manifest["metadata"]["resourceVersion"])


def _uid(manifest: Manifest) -> str:
    return str(manifest["metadata"]["uid"])
