"""One run of the collector over one namespace: what goes, in which order, and why that is safe.

Listings are streamed and may come in any order; what is remembered of them has a fixed size. Every
age is by the store's own clock: between its time of a marker written now and of the thing itself.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.object.failures import Failure, RequestError
from sglang_tiered.storage.object.forgotten import Forgotten
from sglang_tiered.storage.object.format import (
    MAX_MANIFEST_BYTES,
    MAX_PURGE_BYTES,
    other_version,
    unpack_manifest,
    unpack_purge,
)
from sglang_tiered.storage.object.listings import Entry, IdFilter, Oldest
from sglang_tiered.storage.object.names import Layout, parse_id, tenant_tag
from sglang_tiered.storage.object.old_tombstones import OldTombstone, OldTombstones
from sglang_tiered.storage.object.pinning.collected import PinnedObjects
from sglang_tiered.storage.object.pinning.pins import pin_share
from sglang_tiered.storage.object.removals import CollectorReport, Removal
from sglang_tiered.storage.region.pinning.pins import MAX_PIN_BYTES
from sglang_tiered.storage.region.pinning.pins import unpack as unpack_pin

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.object.names import ObjectId
    from sglang_tiered.storage.object.removals import CollectorSettings

__all__ = ["Collection", "store_clock"]

_CLOCKS = "clocks"
_GRAVES = "graves"
_MAX_GRAVES = 100_000
_MAX_PURGES = 1 << 16
_LOOKED_AT_ONCE = 16  # objects that may go for their age between two looks at the pins
_EVERYONE = -1  # beside the tags of tenants
_CLOCK_STEP_S = 1.0  # S3 tells times in whole seconds
_STAGED = re.compile(r"(.+)#\d+")  # what obstore calls a file of a directory until it is whole


def store_clock(client: ObjectClient, layout: Layout) -> float:
    """Return the store's time: what its listing says of something written now."""
    folder = f"{layout.folder}/{_CLOCKS}"
    path = f"{folder}/{secrets.token_hex(8)}"
    client.put(path, b"now")
    try:
        # One that does not show it yet shows older ones at best: then ages seem smaller, which
        # only keeps things longer.
        return max((e.modified for chunk in client.listing(folder) for e in chunk), default=0.0)
    finally:
        client.delete([path])


class Collection:
    """Order of a removal: the grave is written, the manifest deleted, and after the grace the
    object and then the grave. A run that dies anywhere in this leaves what the next one finishes.

    Any number may run at once, beside any number of writers: all of them choose the oldest, and
    what is gone already counts as removed.
    """

    def __init__(
        self,
        client: ObjectClient,
        namespace: bytes,
        settings: CollectorSettings,
        *,
        budget: int,
        delete: bool,
        now: Callable[[], float],
        stop: threading.Event | None = None,
    ) -> None:
        self.report = CollectorReport()
        self._client = client
        self._layout = Layout(namespace)
        self._settings = settings
        self._budget = budget
        self._delete = delete
        self._clock = now
        self._stop = stop
        self._now = 0.0

        self._graves: set[str] = set()
        self._bounds: dict[int, dict[bytes | None, int]] = {}
        self._unfinished_purges: set[bytes | None] = set()
        self._forgets = OldTombstones()
        self._forgotten = Forgotten()
        self._pins = PinnedObjects(pin_share(settings.capacity_bytes))
        self._live = IdFilter()
        self._present = IdFilter()
        self._num_live = 0
        self._purged_bytes = 0  # counted as alive, but gone before the byte cap is looked at

    @property
    def _graves_folder(self) -> str:
        return f"{self._layout.folder}/{_GRAVES}"

    def run(self) -> CollectorReport:
        """Collect once. Raises ``RequestError``; what was done until then stands."""
        begun, before = time.monotonic(), self._client.requests
        try:
            self._now = self._clock()
            self._empty_graves()
            self._read_pins()  # first: only what they name is kept of the forgets
            purges = self._read_purges()
            self._judge_pins()
            self._read_manifests()
            purged, orphans, oldest = self._read_objects()
            for entry in purged:
                self._remove_purged(entry)
            for entry in orphans:
                self._remove_orphan(entry)
            self._bury(oldest)
            if self.report.num_manifests > self._num_live:
                self._remove_dangling()
            self._forget_purges(purges)
            self._forget_tombstones()
            self._remove_markers()
            self._remove_staged()
        except _Enough:
            self.report.is_complete = False
        finally:
            self.report.seconds = time.monotonic() - begun
            now = self._client.requests
            self.report.requests = {kind: now[kind] - before.get(kind, 0) for kind in now}
        return self.report

    # -- what is there ----------------------------------------------------------------------

    def _empty_graves(self) -> None:
        """Delete objects whose grace is over. The manifest goes first, once more: a collector may
        have died between grave and manifest."""
        due: list[tuple[str, str]] = []
        for path, entry in self._list(self._graves_folder):
            if parse_id(entry.name) is None:
                self.report.num_foreign += 1
            elif self._age_s(entry) < self._settings.grace_s:
                self._graves.add(entry.name)
            elif len(due) <= self._budget:
                due.append((path, entry.name))
                self._graves.add(entry.name)
        for path, name in due:
            nbytes = self._size(self._layout.object(name))
            removal = self._plan(self._layout.object(name), "object", nbytes, "its grace is over")
            if self._delete:
                self._erase(self._layout.manifest(name), self._layout.object(name), path)
                self._graves.discard(name)
                self._done(removal)
        self.report.num_buried = len(self._graves)

    def _read_purges(self) -> list[tuple[str, Entry, bytes | None]]:
        found: list[tuple[str, Entry, bytes | None]] = []
        for path, entry in self._list(self._layout.purges):
            if parse_id(entry.name) is None or len(found) >= _MAX_PURGES:
                self.report.num_foreign += 1
                continue
            purge = unpack_purge(self._get(path, MAX_PURGE_BYTES) or b"")
            if purge is None or purge.namespace != self._layout.namespace:
                self.report.num_unreadable += 1
                continue
            if purge.keys:
                self._forgotten.add(self._pins.named.intersection(purge.keys), purge.bound_ms)
                if self._age_s(entry) >= self._settings.purge_keep_s:
                    self._forgets.add(OldTombstone(path, entry, purge.bound_ms, purge.keys))
                continue
            tag = _EVERYONE if purge.tenant is None else tenant_tag(purge.tenant)
            bounds = self._bounds.setdefault(tag, {})
            bounds[purge.tenant] = max(bounds.get(purge.tenant, 0), purge.bound_ms)
            found.append((path, entry, purge.tenant))
        return found

    def _read_pins(self) -> None:
        for path, entry in self._list(self._layout.pins):
            pin_id = parse_id(entry.name)
            if pin_id is None:
                self.report.num_foreign += 1
            elif pin_id not in self._pins:
                found = unpack_pin(bytes(self._get(path, MAX_PIN_BYTES) or b""))
                if found is None:
                    self.report.num_unreadable += 1  # or unpinned meanwhile
                else:
                    self._pins.add(found, pin_id, entry)

    def _judge_pins(self) -> None:
        """Find what the pins keep, and remove those that are over."""
        self._pins.take_up(
            lambda pin, pin_id: (
                not (pin.until_s is not None and pin.until_s <= self._now)
                and not self._is_purged(pin_id, pin.tenant)
            ),
            self._forgotten,
        )
        for pin_id, entry in self._pins.over():
            path = self._layout.pin(pin_id)
            removal = self._plan(path, "pin", entry.nbytes, "it keeps nothing any more")
            if self._delete:
                self._erase(path)
                self._done(removal)

    def _read_manifests(self) -> None:
        for _, entry in self._list(self._layout.manifests):
            if parse_id(entry.name) is None:
                self.report.num_foreign += 1
            else:
                self.report.num_manifests += 1
                self._live.add(entry.name)

    def _read_objects(self) -> tuple[list[Entry], list[Entry], list[Entry]]:
        """Find purged objects, orphans past their grace, and the oldest of those alive."""
        purged: list[Entry] = []
        orphans: list[Entry] = []
        oldest = Oldest(self._budget + 1)
        report = self.report
        for _, entry in self._list(self._layout.objects):
            object_id = parse_id(entry.name)
            if object_id is None:
                report.num_foreign += 1
                continue
            report.num_objects += 1
            report.object_bytes += entry.nbytes
            self._present.add(entry.name)
            if entry.name not in self._live:
                if entry.name in self._graves:
                    continue
                report.num_orphans += 1
                if self._age_s(entry) >= self._settings.orphan_grace_s:
                    if len(orphans) <= self._budget:
                        orphans.append(entry)
                else:
                    self._forgets.keep_for(object_id)
                    if self._maybe_purged(object_id):
                        self._keep_purges(object_id)
                continue
            self._num_live += 1
            report.live_bytes += entry.nbytes
            self._forgets.saw(object_id, entry)
            if self._maybe_purged(object_id):
                if len(purged) <= self._budget:
                    purged.append(entry)
                else:
                    self._keep_purges(object_id)
            else:
                oldest.add(entry)
        return purged, orphans, oldest.take()

    def _maybe_purged(self, object_id: ObjectId) -> bool:
        """Judge by the name, which may be that of another tenant's object; the manifest decides."""
        return any(
            object_id.unix_ms <= bound
            for tag in (_EVERYONE, object_id.tenant_tag)
            for bound in self._bounds.get(tag, {}).values()
        )

    def _is_purged(self, object_id: ObjectId, tenant: bytes) -> bool:
        everyone = self._bounds.get(_EVERYONE, {}).get(None, -1)
        own = self._bounds.get(object_id.tenant_tag, {}).get(tenant, -1)
        return object_id.unix_ms <= max(everyone, own)

    def _keep_purges(self, object_id: ObjectId) -> None:
        for tag in (_EVERYONE, object_id.tenant_tag):
            self._unfinished_purges |= self._bounds.get(tag, {}).keys()

    # -- what goes --------------------------------------------------------------------------

    def _remove_purged(self, entry: Entry) -> None:
        """Remove a purged object at once, without a grace: no server may read it."""
        data = self._get(self._layout.manifest(entry.name))
        object_id = parse_id(entry.name)
        assert object_id is not None
        if data is None or other_version(data) is not None:
            # Another collector is at it, or another program's: an orphan, or foreign.
            self._keep_purges(object_id)
            return
        manifest = unpack_manifest(data)
        if manifest is None:
            self.report.num_unreadable += 1  # unreadable for all, so nothing is lost if it goes
        elif not self._is_purged(object_id, manifest.tenant):
            return  # another tenant with the same tag
        removal = self._plan(self._layout.object(entry.name), "object", entry.nbytes, "purged")
        self._purged_bytes += entry.nbytes
        if self._delete:
            self._erase(self._layout.manifest(entry.name), self._layout.object(entry.name))
            self._done(removal)
        else:
            self._keep_purges(object_id)

    def _remove_orphan(self, entry: Entry) -> None:
        """Remove an object unless it has a manifest after all, which a listing did not show yet."""
        if self._size(self._layout.manifest(entry.name), missing=-1) >= 0:
            return
        path = self._layout.object(entry.name)
        removal = self._plan(path, "object", entry.nbytes, "was never announced")
        if self._delete:
            self._erase(path)
            self._done(removal)

    def _bury(self, oldest: list[Entry]) -> None:
        settings = self._settings
        left = self.report.live_bytes - self._purged_bytes
        for number, entry in enumerate(oldest):
            if settings.ttl_s is not None and self._age_s(entry) >= settings.ttl_s:
                reason = "older than the time to live"
            elif settings.capacity_bytes is not None and left > settings.capacity_bytes:
                reason = "beyond the byte cap"
            else:
                return
            if number % _LOOKED_AT_ONCE == 0:
                self._read_pins()  # again: a pin is at once
                self._judge_pins()
            if self._is_pinned(entry):
                continue
            if len(self._graves) >= _MAX_GRAVES:
                raise _Enough
            left -= entry.nbytes
            removal = self._plan(self._layout.object(entry.name), "object", entry.nbytes, reason)
            if self._delete:
                self._client.put(f"{self._graves_folder}/{entry.name}", reason.encode())
                self._erase(self._layout.manifest(entry.name))
                self._graves.add(entry.name)
                self.report.num_buried += 1
                removal.is_done = True

    def _is_pinned(self, entry: Entry) -> bool:
        if not self._pins.keys:
            return False
        manifest = unpack_manifest(self._get(self._layout.manifest(entry.name)) or b"")
        return manifest is not None and self._pins.keeps(manifest)

    def _remove_dangling(self) -> None:
        """Remove manifests whose object is gone: it was deleted by hand, or a stalled writer
        announced what had been taken for an orphan."""
        for path, entry in self._list(self._layout.manifests):
            if parse_id(entry.name) is None or entry.name in self._present:
                continue
            if entry.name in self._graves or self._age_s(entry) < self._settings.grace_s:
                continue
            if self._size(self._layout.object(entry.name), missing=-1) >= 0:
                continue
            removal = self._plan(path, "manifest", entry.nbytes, "its object is gone")
            if self._delete:
                self._erase(path)
                self._done(removal)

    def _forget_purges(self, purges: list[tuple[str, Entry, bytes | None]]) -> None:
        for path, entry, tenant in purges:
            if tenant in self._unfinished_purges:
                continue
            if self._age_s(entry) >= self._settings.purge_keep_s:
                removal = self._plan(path, "purge", entry.nbytes, "nothing of it is left")
                if self._delete:
                    self._erase(path)
                    self._done(removal)

    def _forget_tombstones(self) -> None:
        """Remove tombstones that no object needs any more, and objects that hold nothing but what
        they speak of."""
        forgets = self._forgets
        older = forgets.to_read()
        if older is None:
            return
        for entry in older:
            if entry.name in self._graves:
                continue
            data = self._get(self._layout.manifest(entry.name))
            manifest = None if data is None else unpack_manifest(data)
            if manifest is None:
                object_id = parse_id(entry.name)
                assert object_id is not None
                if data is not None and other_version(data) is not None:
                    forgets.keep_for(object_id)
            elif forgets.is_dead(manifest):
                path = self._layout.object(entry.name)
                removal = self._plan(path, "object", entry.nbytes, "all its pages are forgotten")
                if self._delete:
                    self._erase(self._layout.manifest(entry.name), path)
                    self._done(removal)
                else:
                    forgets.keep_for(manifest.object_id)
        forgets.keep_of(self._pins.forgotten_keys)
        for path, entry, _, _ in forgets.over():
            removal = self._plan(path, "purge", entry.nbytes, "nothing of it is left")
            if self._delete:
                self._erase(path)
                self._done(removal)

    def _remove_markers(self) -> None:
        """Remove markers of the clock that a dead collector left."""
        for path, entry in self._list(f"{self._layout.folder}/{_CLOCKS}"):
            if self._delete and self._age_s(entry) >= self._settings.grace_s:
                self._erase(path)

    def _remove_staged(self) -> None:
        """Remove files of a directory that a dead writer left. A bucket has its own rule for
        half-finished multipart uploads, which obstore cannot list."""
        if self._client.directory is None:
            return
        layout = self._layout
        for folder in (layout.objects, layout.manifests, layout.purges, layout.pins):
            directory = self._client.directory / folder
            with contextlib.suppress(FileNotFoundError):
                for file in directory.iterdir():
                    match = _STAGED.fullmatch(file.name)
                    if match is None or parse_id(match[1]) is None:
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat()
                        age_s = self._now - status.st_mtime
                        if age_s < self._settings.orphan_grace_s:
                            continue
                        removal = self._plan(
                            f"{folder}/{file.name}",
                            "staged file",
                            status.st_size,
                            "its writer never finished it",
                        )
                        if self._delete:
                            file.unlink()
                            self._done(removal)

    # -- requests ---------------------------------------------------------------------------

    def _list(self, folder: str) -> Iterator[tuple[str, Entry]]:
        for chunk in self._client.listing(folder):
            self._check_stop()
            for path, size, modified in chunk:
                yield path, Entry(modified, path[len(folder) + 1 :], size)

    def _get(self, path: str, max_bytes: int = MAX_MANIFEST_BYTES) -> memoryview | None:
        self._check_stop()
        try:
            return self._client.get(path, max_bytes)
        except RequestError as error:
            if error.failure is not Failure.NOT_FOUND:
                raise
            return None

    def _size(self, path: str, *, missing: int = 0) -> int:
        self._check_stop()
        try:
            return self._client.size(path)
        except RequestError as error:
            if error.failure is not Failure.NOT_FOUND:
                raise
            return missing

    def _erase(self, *paths: str) -> None:
        """Delete what is there; what another process has deleted is gone too. Each takes a request
        of its own, as their order matters."""
        for path in paths:
            self._client.delete([path])

    def _age_s(self, entry: Entry) -> float:
        return self._now - entry.modified - _CLOCK_STEP_S

    def _plan(self, path: str, kind: str, nbytes: int, reason: str) -> Removal:
        self._check_stop()
        if len(self.report.removals) >= self._budget:
            raise _Enough
        self.report.removals.append(removal := Removal(path, kind, nbytes, reason))
        return removal

    def _done(self, removal: Removal) -> None:
        removal.is_done = True
        self.report.num_removed += 1
        self.report.removed_bytes += removal.nbytes

    def _check_stop(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise _Enough


class _Enough(Exception):
    """Raised when the budget is spent, or the caller wants an end."""
