"""What the collector is told, what it plans and what it did."""

from __future__ import annotations

import msgspec

__all__ = ["CollectorReport", "CollectorSettings", "Removal"]


class CollectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    capacity_bytes: int | None = None
    """Of all objects of the namespace that have a manifest; the oldest go beyond it."""

    ttl_s: float | None = None
    """Objects older than this go."""

    grace_s: float = 300.0
    """From the end of a manifest to the end of its object: readers that know the object may go on
    until they have noticed."""

    orphan_grace_s: float = 6 * 3600.0
    """Objects without a manifest are left alone for so long: their writer is about to announce
    them. It must be more than any writer takes from an object to its manifest."""

    purge_keep_s: float = 7 * 86400.0
    """A purge is remembered at least so long, for objects that a stalled writer announces late."""

    interval_s: float = 600.0
    """Between runs in the background, of all servers together."""


class Removal(msgspec.Struct):
    path: str
    kind: str  # object, manifest, purge, staged file
    nbytes: int  # of the object, where it is known
    reason: str
    is_done: bool = False


class CollectorReport(msgspec.Struct):
    """What one run saw and did. ``removals`` holds at most the run's budget."""

    num_objects: int = 0
    num_manifests: int = 0
    object_bytes: int = 0
    live_bytes: int = 0  # of objects with a manifest, before anything was removed
    num_orphans: int = 0  # objects without a manifest, those included that may yet get one
    num_buried: int = 0  # objects whose manifest is gone, waiting for their grace to end
    num_foreign: int = 0  # foreign names; left alone
    num_unreadable: int = 0  # purges and manifests that do not verify or are of another format
    num_removed: int = 0  # objects, manifests, purges and staged files
    removed_bytes: int = 0
    is_complete: bool = True  # false: stopped, or the budget ended it
    seconds: float = 0.0
    removals: list[Removal] = msgspec.field(default_factory=list)
    requests: dict[str, int] = msgspec.field(default_factory=dict)
