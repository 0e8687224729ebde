"""The purges that this server knows of, and those that are not in Redis yet. A request to forget
single pages, a ``Forget``, is one of them here; its keys go beside it.

All servers of a namespace come to know the same set: each adds to Redis the purges that are missing
there and applies those that it finds there. A digest of the set, in every server's record, shows
which servers have applied the same purges. That does not depend on what Redis keeps: the servers
that know a lost purge add it again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from sglang_tiered.sharing.locality.formats import (
    FORGET_KEYS,
    Purge,
    pack_forget,
    pack_keys,
    pack_purge,
    unpack_forget,
)
from sglang_tiered.storage.promises import keep, promise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Erasure

__all__ = ["MAX_PURGES", "DuePurge", "PurgeBook"]

MAX_PURGES = 16_384
"""Bounds the known purges of one namespace; beyond it the oldest are forgotten."""

MAX_KEPT = 512
"""Forgets in Redis whose keys are kept, to be added again should it lose them: 16 MiB. The oldest
go first."""

MAX_DUE_KEPT = 8192
"""Forgets whose keys wait for Redis, 256 MiB at worst. Beyond it the oldest fail, as nobody could
follow one without its keys."""

DIGEST_BYTES = 16


class DuePurge(NamedTuple):
    """A purge to be added to Redis."""

    namespace: bytes
    member: bytes
    age_s: float
    keys: bytes | None = None  # packed, of a forget


class _Spreading(NamedTuple):
    """A request to forget pages that began here, until all servers have followed it."""

    members: frozenset[bytes]
    is_done: Future[bool]


class PurgeBook:
    """Thread-safe; never blocks. Times are ``clock``'s."""

    def __init__(self, namespace: bytes, retention_s: float, clock: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._namespace = namespace
        self._retention_s = retention_s
        self._clock = clock
        self._known: dict[bytes, float] = {}  # when each may be forgotten
        self._due: dict[tuple[bytes, bytes], float] = {}  # (namespace, member): when it began
        self._watched: dict[bytes, Future[bool]] = {}  # begun here and due
        self._local: dict[bytes, Future[bool]] = {}  # not known to be durable here
        self._keys: dict[bytes, bytes] = {}  # of forgets, packed
        self._spreading: list[_Spreading] = []
        self._recalled: dict[bytes, dict[bytes, float]] = {}  # of other namespaces
        self._sum = 0
        self.num_told = 0
        self.num_applied = 0

    @property
    def digest(self) -> bytes:
        """The digest of the set of purges that were applied here, in any order."""
        return self._sum.to_bytes(DIGEST_BYTES, "little")

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_due(self) -> int:
        return len(self._due)

    def begin(self, what: Erasure, local: Future[bool] | None = None) -> Future[bool]:
        """Begin an erasure that this server has applied itself; ``local`` is true once it is
        durable. The result is true once it is in Redis, and of single pages once every server that
        lives has followed (``agreed``); false if the book was closed or, of single pages, the
        namespace changed before."""
        is_done = promise()
        if what.keys is None:
            with self._lock:
                self._begin(pack_purge(Purge(what.id, what.tenant)), is_done, local)
            return is_done
        packed = {}
        for at in range(0, len(what.keys), FORGET_KEYS):
            number = xxhash.xxh3_128_digest(what.id, seed=at) if at else what.id
            part = what.keys[at : at + FORGET_KEYS]
            packed[pack_forget(number, part)] = pack_keys(number, part)
        with self._lock:
            self._spreading.append(_Spreading(frozenset(packed), is_done))
            self._keys.update(packed)
            for member in packed:
                self._begin(member, promise(), local)
            self._drop_keys()
        return is_done

    def _begin(self, member: bytes, told: Future[bool], local: Future[bool] | None) -> None:
        self._learn(member, self._clock() + self._retention_s, local)
        self._due[self._namespace, member] = self._clock()
        self._watched[member] = told
        while len(self._due) > MAX_PURGES:  # of namespaces before
            self._drop_due(*next(iter(self._due)))

    def _drop_keys(self) -> None:
        """Drop the keys of the oldest forgets in Redis, and beyond their own bound what is due."""
        if len(self._keys) <= MAX_KEPT:
            return
        due = {member: namespace for namespace, member in self._due}
        told = [member for member in self._keys if member not in due]
        for member in told[: max(len(told) - MAX_KEPT, 0)]:
            del self._keys[member]
        waiting = [member for member in self._keys if member in due]
        for member in waiting[: max(len(waiting) - MAX_DUE_KEPT, 0)]:
            if due[member] == self._namespace:
                self._forget(member)
            else:
                self._drop_due(due[member], member)

    @property
    def is_spreading(self) -> bool:
        """Whether other servers are waited for."""
        return bool(self._spreading)

    def agreed(self, digest: bytes) -> None:
        """Note that every server that lives has applied the purges of this digest."""
        with self._lock:
            if digest != self.digest:
                return
            due = {member for _, member in self._due}
            self._end_spreading(lambda each: due.isdisjoint(each.members), succeeded=True)

    def _end_spreading(self, ends: Callable[[_Spreading], bool], *, succeeded: bool) -> None:
        ended = [each for each in self._spreading if ends(each)]
        self._spreading = [each for each in self._spreading if each not in ended]
        for each in ended:
            keep(each.is_done, succeeded)

    def kept_keys(self, limit: int) -> dict[bytes, bytes]:
        """The packed keys of the newest forgets, by their number."""
        with self._lock:
            newest = list(self._keys.items())[-limit:]
        forgets = ((unpack_forget(member), keys) for member, keys in newest)
        return {forget.number: keys for forget, keys in forgets if forget is not None}

    def applied(
        self,
        member: bytes,
        age_s: float,
        local: Future[bool] | None = None,
        keys: bytes | None = None,
    ) -> None:
        """Note that a peer's purge was applied here; ``local`` is true once it is durable.
        ``keys``: packed, of a forget."""
        with self._lock:
            if keys is not None:
                self._keys[member] = keys
                self._drop_keys()
            self._learn(member, self._clock() + self._retention_s - age_s, local)
            self.num_applied += 1

    def recall(self, namespace: bytes, member: bytes, forget_at: float) -> None:
        """Note a purge that was durable in the store when it was last open."""
        now = self._clock()
        if not now < forget_at <= now + self._retention_s:
            return  # expired, or the machine's clock was wrong
        with self._lock:
            if namespace == self._namespace:
                self._learn(member, forget_at, None)
            else:
                self._recalled.setdefault(namespace, {})[member] = forget_at

    def settled(self) -> tuple[bytes, dict[bytes, float]]:
        """The namespace, and its purges that are durable here: when each may be forgotten."""
        with self._lock:
            for member, local in list(self._local.items()):
                if local.done() and local.result():
                    del self._local[member]
            durable = {m: at for m, at in self._known.items() if m not in self._local}
            return self._namespace, durable

    def unknown(self, members: Iterable[bytes]) -> list[bytes]:
        with self._lock:
            return [member for member in members if member not in self._known]

    def compare(self, members: set[bytes]) -> None:
        """Compare with the purges in Redis: one missing there is due, or forgotten if it is old or
        a forget whose keys are gone here: a server that has them makes it due, and it is applied
        here once more."""
        with self._lock:
            now = self._clock()
            for member, forget_at in list(self._known.items()):
                if member in members:
                    self._due.pop((self._namespace, member), None)
                    self._settle(member)
                elif forget_at <= now or (
                    member not in self._keys and unpack_forget(member) is not None
                ):
                    self._forget(member)
                else:
                    self._due.setdefault((self._namespace, member), forget_at - self._retention_s)

    def due(self, limit: int) -> list[DuePurge]:
        """The purges to be added to Redis, oldest first."""
        with self._lock:
            now = self._clock()
            return [
                DuePurge(namespace, member, max(now - began, 0.0), self._keys.get(member))
                for (namespace, member), began in list(self._due.items())[:limit]
            ]

    def told(self, purges: Iterable[DuePurge]) -> None:
        """Note that purges are in Redis now."""
        with self._lock:
            for purge in purges:
                self._due.pop((purge.namespace, purge.member), None)
                self._settle(purge.member)
            self._drop_keys()

    def change_namespace(self, namespace: bytes) -> None:
        """Continue under another namespace. Due purges of the old one are still published there;
        nothing else of it is kept."""
        with self._lock:
            if namespace != self._namespace:
                self._namespace = namespace
                self._known.clear()
                self._local.clear()
                self._sum = 0
                self._end_spreading(lambda _: True, succeeded=False)
                for member, forget_at in self._recalled.pop(namespace, {}).items():
                    self._learn(member, forget_at, None)

    def close(self) -> None:
        """End all purges that are still due: they will not be published."""
        with self._lock:
            for purge in self._watched.values():
                keep(purge, False)
            self._watched.clear()
            self._due.clear()
            self._end_spreading(lambda _: True, succeeded=False)

    def _settle(self, member: bytes) -> None:
        purge = self._watched.pop(member, None)
        if purge is not None:
            keep(purge, True)
            self.num_told += 1

    def _learn(self, member: bytes, forget_at: float, local: Future[bool] | None) -> None:
        if local is not None:
            self._local[member] = local
        if member not in self._known:
            self._sum ^= xxhash.xxh3_128_intdigest(member)
        self._known[member] = forget_at
        while len(self._known) > MAX_PURGES:
            self._forget(min(self._known, key=lambda each: (self._known[each], each)))

    def _forget(self, member: bytes) -> None:
        del self._known[member]
        self._local.pop(member, None)
        self._sum ^= xxhash.xxh3_128_intdigest(member)
        self._drop_due(self._namespace, member)

    def _drop_due(self, namespace: bytes, member: bytes) -> None:
        """End a purge, due or not: it will not be published any more."""
        self._due.pop((namespace, member), None)
        self._keys.pop(member, None)
        purge = self._watched.pop(member, None)
        if purge is not None:
            keep(purge, False)
        self._end_spreading(lambda each: member in each.members, succeeded=False)

    def check_integrity(self) -> None:
        with self._lock:
            total = 0
            for member in self._known:
                total ^= xxhash.xxh3_128_intdigest(member)
            assert total == self._sum, f"the digest of {len(self._known)} purges is off"
            due = {member for _, member in self._due}
            assert self._local.keys() <= self._known.keys(), "a purge under way is not known"
            assert self._watched.keys() <= due, "a purge is awaited and not due"
            lacking = {member for member in due if unpack_forget(member) is not None}
            assert lacking <= self._keys.keys(), "a forget is due and its keys are gone"
