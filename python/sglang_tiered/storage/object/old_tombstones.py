"""Tombstones of single pages that the collector may remove: whether an object is left that they
concern. It takes the manifests of the objects that are older, so few that a run can read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.object.forgotten import MAX_FORGOTTEN, Forgotten

if TYPE_CHECKING:
    from sglang_tiered.storage.object.format import Manifest
    from sglang_tiered.storage.object.listings import Entry
    from sglang_tiered.storage.object.names import ObjectId

__all__ = ["OldTombstone", "OldTombstones"]

_MAX_READ = 1000
"""Manifests that a run reads for it. With more older objects all tombstones stay; these objects go
first, by the cap or the time to live."""


class OldTombstone(NamedTuple):
    path: str
    entry: Entry
    bound_ms: int
    keys: tuple[bytes, ...]


class OldTombstones:
    """Tombstones whose time is over, as many as ``MAX_FORGOTTEN`` pages make, and the objects that
    are older than one of them."""

    def __init__(self) -> None:
        self._tombstones: list[OldTombstone] = []
        self._forgotten = Forgotten()
        self._until_ms = -1
        self._objects: list[Entry] = []
        self._keep_from_ms: int | None = None
        self._needed: set[bytes] = set()

    def add(self, tombstone: OldTombstone) -> None:
        if len(self._forgotten) + len(tombstone.keys) <= MAX_FORGOTTEN:
            self._tombstones.append(tombstone)
            self._forgotten.add(tombstone.keys, tombstone.bound_ms)
            self._until_ms = max(self._until_ms, tombstone.bound_ms)

    def saw(self, object_id: ObjectId, entry: Entry) -> None:
        """Note an object that is announced."""
        if object_id.unix_ms <= self._until_ms and len(self._objects) <= _MAX_READ:
            self._objects.append(entry)

    def keep_for(self, object_id: ObjectId) -> None:
        """Keep the tombstones that an object may need which cannot be looked into."""
        at = object_id.unix_ms
        self._keep_from_ms = at if self._keep_from_ms is None else min(self._keep_from_ms, at)

    def keep_of(self, keys: set[bytes]) -> None:
        """Keep the tombstones of pages that something else names, a pin say."""
        self._needed |= keys

    def to_read(self) -> list[Entry] | None:
        """Return the objects to look into; None where they are too many."""
        return self._objects if len(self._objects) <= _MAX_READ else None

    def is_dead(self, manifest: Manifest) -> bool:
        """Return whether no page of an object is left; keeps the tombstones that say so of some."""
        dead = self._forgotten.dead(manifest)
        if not dead.all():
            self._needed.update(bytes(key) for key in manifest.pages["key"][dead])
        return bool(dead.all())

    def over(self) -> list[OldTombstone]:
        """Return the tombstones that concern no object."""
        first = self._keep_from_ms
        return [
            each
            for each in self._tombstones
            if (first is None or each.bound_ms < first) and self._needed.isdisjoint(each.keys)
        ]
