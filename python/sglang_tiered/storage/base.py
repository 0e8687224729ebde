"""The contract of a tier.

A tier keeps *pages* under 32-byte keys. Pages come in *runs*: the consecutive pages of one radix
node's chain. Every tier is a ``TierEngine``; those that servers share lie beyond this machine.
``test/contract`` runs over all of them. The rules that every tier keeps, and what tests each:

1. ``lookup``, ``contains`` and ``some_keys`` read memory only and return at once; they may run on
   the scheduler thread. ``test_lookup_counts_leading_hits_only``
2. ``submit_store`` and ``submit_load`` return a ``Job`` at once. They never raise for a condition
   of the tier: a full disk, a sick device or a closed tier is a job that finishes with a reason.
   ``test_a_closed_tier_answers_and_promises_nothing``
3. A key becomes visible to ``lookup`` only after its bytes can be read back, checksums included.
   ``test_visible_only_when_readable``
4. A page is delivered only if its bytes were verified against the key and the namespace they were
   stored under. Anything doubtful is a miss, and the doubtful entry is dropped.
   ``test_a_flipped_bit_is_corrupt_then_a_miss``
5. The buffers of a run belong to the tier from submission until the job is done; the tier never
   touches them afterwards. This is what makes it safe to hand them to someone else.
   ``test_the_store_lets_go_of_the_buffers``
6. Loads go before stores. Under pressure stores are dropped first, with ``Reason.REJECTED``: of a
   run that does not fit, the pages from the first on that does not.
   ``test_a_full_queue_drops_from_the_end``
7. Nothing blocks except ``flush``, ``refresh``, ``close``, ``Job.wait`` and ``Future.result``; none
   of those may be called on the scheduler thread while requests are running.
   ``test_lookups_never_wait_whatever_hangs``, ``test_hanging_io_is_noticed_by_whoever_asks``
8. Every page belongs to the tenant its run names, if any. Keys of different tenants never
   coincide: that is the caller's promise. A tenant over its share never costs others theirs.
   What is erased has no hit from the moment ``erase`` returns, and no store of it submitted before
   lands behind that. An erasure waits for no store or load but those under way.
   ``test_a_tenant_never_holds_more_than_its_share``,
   ``test_an_erasure_takes_what_it_names_alone``,
   ``test_no_earlier_store_lands_behind_an_erasure``
9. A future that a tier returns ends at the latest when the tier is closed. Its callbacks run on the
   thread that ends it, perhaps under a lock of the tier: they must only note.
   ``test_a_callback_sees_complete_reasons``
"""

from __future__ import annotations

import enum
import secrets
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from xxhash import xxh3_128_digest

from sglang_tiered.metrics import DurationCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future


KEY_BYTES = 32
TENANT_BYTES = 16
NO_TENANT = bytes(TENANT_BYTES)


def unique_keys(keys: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return each key once, in order. Raises ``ValueError`` for one of another length."""
    unique = tuple(dict.fromkeys(keys))
    for key in unique:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {len(key)} bytes, expected {KEY_BYTES}")
    return unique


Page = tuple[memoryview, ...]
"""The segments of one page, in order; its bytes are their concatenation. Format ``B``, 1-D,
C-contiguous; writable where the run is to be loaded."""


class Tier(enum.Enum):
    """Where a page can be."""

    NVME = "nvme"  # this server's own
    PEER = "peer"  # what other servers hold on theirs
    OBJECT = "object"  # the bucket


REMOTE_TIERS = (Tier.PEER, Tier.OBJECT)
"""Where pages that NVMe lacks may be, in the order in which they are asked by default."""


class Span(NamedTuple):
    """Consecutive pages of a prefix that come from one tier."""

    tier: Tier
    num_pages: int


class Health(enum.Enum):
    """What a tier can do now. RUNNING -> MISS_ONLY -> FAILED, with automatic retry back."""

    RUNNING = "running"
    MISS_ONLY = "miss_only"  # answers every lookup with a miss and drops stores; retries by itself
    FAILED = "failed"  # closed, or beyond retrying


class Stop(enum.Enum):
    """Why the leading hits of a lookup ended."""

    END = "end"  # every key was a hit
    MISS = "miss"  # the next key is not held
    PENDING = "pending"  # the next key is being stored and not yet readable
    UNHEALTHY = "unhealthy"  # the engine answers misses only


class LookupResult(NamedTuple):
    """Leading hits of a key chain, and why they ended."""

    num_hits: int
    stop: Stop


class JobKind(enum.Enum):
    STORE = "store"
    LOAD = "load"

    __hash__ = object.__hash__  # counted once a page: Enum's own is a call of Python


class Reason(enum.Enum):
    """Why a page of a finished job was or was not served."""

    OK = "ok"  # the only reason, with DUPLICATE, that counts as success
    DUPLICATE = "duplicate"  # store only: already held or on its way; counts as success
    MISS = "miss"  # load only: the key is not held, or the engine is MISS_ONLY
    CORRUPT = "corrupt"  # load only: bytes did not verify; the entry was dropped
    IO_ERROR = "io_error"  # a load may drop the page, or a bad sector would fail forever
    NO_SPACE = "no_space"  # store only: no room and nothing to reclaim, or a page beyond any region
    REJECTED = "rejected"  # store only: dropped by admission, back-pressure or bad health
    OVER_SHARE = "over_share"  # store only: its tenant has its share, and nothing of it can go
    CANCELLED = "cancelled"  # cancelled before its I/O began, engine closed, or erased

    __hash__ = object.__hash__  # as above


class Meter(Protocol):
    """Is told what a load takes. Any thread, at times under a tier's lock, so it only notes."""

    def begins(self, tier: Tier, num_bytes: int) -> Callable[[Job], None]:
        """Note that a read of so many bytes is asked of a tier. Returns what to call with its job
        at its end."""
        ...

    def verified(self, seconds: float) -> None:
        """Note how long a thread took to check what it had read from NVMe."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pages of one chain: ``keys[i]`` names the bytes of ``pages[i]``.

    Keys are ``KEY_BYTES`` long and unique within the run. ``tenant`` says whose pages a store
    brings; a load need not name it. ``meter``, if there is one, is told what a load takes. Raises
    ``ValueError`` for a malformed run: that is our own bug, not a condition of the tier.
    """

    keys: tuple[bytes, ...]
    pages: tuple[Page, ...]
    tenant: bytes = NO_TENANT
    meter: Meter | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.pages):
            raise ValueError(f"a run has {len(self.keys)} keys but {len(self.pages)} pages")
        for key in self.keys:
            if len(key) != KEY_BYTES:
                raise ValueError(f"a key has {len(key)} bytes, expected {KEY_BYTES}")
        if len(self.tenant) != TENANT_BYTES:
            raise ValueError(f"a tenant has {len(self.tenant)} bytes, expected {TENANT_BYTES}")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("a run names the same key twice")
        for page in self.pages:
            if sum(segment.nbytes for segment in page) == 0:
                raise ValueError("a page of a run is empty")

    @property
    def num_pages(self) -> int:
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        return sum(segment.nbytes for page in self.pages for segment in page)


@dataclass(eq=False)
class Job:
    """One submitted run. Made by the engine, watched by the caller, finished exactly once.

    ``reasons[i]`` tells what became of page ``i``; complete once ``done`` is true.
    """

    kind: JobKind
    run: Run
    reasons: list[Reason] = field(init=False)
    _done: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _cancelled: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _callbacks: list[Callable[[Job], None]] | None = field(
        default_factory=list, init=False, repr=False
    )

    def __post_init__(self) -> None:
        self.reasons = [Reason.CANCELLED] * self.run.num_pages

    @property
    def done(self) -> bool:
        """Return true once the engine has let go of the run's buffers."""
        return self._done.is_set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def ok(self) -> list[bool]:
        """Per page: served (load) or held now (store). Valid once ``done``."""
        return [reason in (Reason.OK, Reason.DUPLICATE) for reason in self.reasons]

    @property
    def num_leading_ok(self) -> int:
        """Return how many leading pages succeeded; a chain is usable up to its first failure."""
        results = self.ok
        return results.index(False) if False in results else len(results)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until done; false when the time ran out. Never on the scheduler thread."""
        return self._done.wait(timeout_s)

    def cancel(self) -> None:
        """Ask the tier to skip what it has not begun of a store. The job still finishes by
        ``done``."""
        self._cancelled.set()

    def call_at_end(self, callback: Callable[[Job], None]) -> None:
        """Call when ``reasons`` are complete and the engine touches the buffers no more, just
        before ``done``; at once if that is so already. The engine may hold its lock then: the
        callback must note what happened and leave the rest to another thread."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self) -> None:
        """Finish the job. The engine calls it, once, after its last touch of the run's buffers."""
        assert not self._done.is_set(), "a job finishes once"
        with self._lock:
            callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            callback(self)
        self._done.set()


PIECE_KEYS = 1024
RECORD_KEYS = 1 << 20


@dataclass(frozen=True, slots=True)
class Erasure:
    """What to erase: the pages of these ``keys`` (of none, if there are none), or all of a
    ``tenant``, or with neither all there is.

    ``id``: what every server knows it by, and applies it once by: 16 random bytes. Who is told of
    it passes that on. Empty: nobody else is to know it, and only the server's own tier erases.
    ``spread``: tell the servers that share a remote tier. False for what one of them told.
    """

    keys: tuple[bytes, ...] | None = None
    tenant: bytes | None = None
    id: bytes = field(default_factory=lambda: secrets.token_bytes(16), compare=False)
    spread: bool = True

    @classmethod
    def of(cls, keys: Iterable[bytes], *, spread: bool = True) -> Erasure:
        """Erase pages, each key once. Raises ``ValueError`` for a key of another length."""
        return cls(unique_keys(keys), spread=spread)

    def split(self, most: int) -> tuple[Erasure, ...]:
        """Return it in parts of so many keys. Where there are several, none has the id of the
        whole: each has one of its own, which follows from that."""
        if self.keys is None or len(self.keys) <= most:
            return (self,)
        return tuple(
            replace(self, keys=self.keys[at : at + most], id=xxh3_128_digest(self.id, seed=at + 1))
            for at in range(0, len(self.keys), most)
        )

    @property
    def records(self) -> tuple[Erasure, ...]:
        """Return it as a bucket keeps it."""
        return self.split(RECORD_KEYS)

    @property
    def pieces(self) -> tuple[Erasure, ...]:
        """Return it as servers tell each other of it, and remember it."""
        return tuple(piece for record in self.records for piece in record.split(PIECE_KEYS))

    @property
    def hashes(self) -> list[str]:
        """Return the keys as SGLang writes them."""
        return [key.hex() for key in self.keys or ()]

    @property
    def is_empty(self) -> bool:
        return self.keys == ()

    @property
    def is_everything(self) -> bool:
        return self.keys is None and self.tenant is None


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the tier was opened, and gauges of now. Reading them takes no I/O. What a tier
    does not have is 0."""

    health: Health
    health_reason: str  # why it is not RUNNING, as one clause; empty while it is
    num_pages: int = 0  # pages a lookup can hit
    stored_bytes: int = 0  # payload bytes of those pages, as stored
    physical_bytes: int = 0  # bytes of storage taken, the figure the cap bounds
    capacity_bytes: int = 0
    num_pages_stored: int = 0
    num_pages_loaded: int = 0
    num_pages_evicted: int = 0
    bytes_stored: int = 0  # payload bytes stored: of the pages as they came, encoded or not
    bytes_written: int = 0  # bytes handed to the device: headers, padding, reinsertion included
    bytes_loaded: int = 0
    num_pages_reinserted: int = 0  # saved from storage that was reclaimed
    bytes_reinserted: int = 0  # payload of those, in bytes_written but not in bytes_stored
    num_inflight_jobs: int = 0
    queued_store_bytes: int = 0  # payload bytes of stores submitted and not done
    num_tenants: int = 0  # that hold pages, no tenant included
    num_pages_erased: int = 0  # hidden by ``erase``
    num_regions_stuck: int = 0  # whose file cannot be removed; of the region engine
    reasons: dict[tuple[JobKind, Reason], int] = field(default_factory=dict)  # pages by outcome
    num_pages_copied: int = 0  # read for the bucket or other servers, and not loaded
    bytes_copied: int = 0
    num_pages_from_memory: int = 0  # of those copied: the owner had them there, none was read
    store_durations: DurationCounts = DurationCounts()  # of jobs that made a page durable
    verification_durations: DurationCounts = DurationCounts()  # of the pages of one read


class TenantUsage(NamedTuple):
    """What one tenant has in a tier now."""

    tenant: bytes
    num_pages: int  # that a lookup can hit
    stored_bytes: int  # payload of those
    physical_bytes: int  # of storage that its pages take, those waiting for reclaim included


class PinInfo(NamedTuple):
    """What a pin keeps now. Pages it names that are not stored are in neither number. In a bucket
    the bytes are those of whole objects."""

    name: str
    tenant: bytes
    num_pages: int  # held
    physical_bytes: int  # of those, with padding; a page of two pins is in both
    until_s: float | None
    data: bytes


class PinRefusal(NamedTuple):
    """A pin that would be beyond a bound; nothing was changed."""

    asked_bytes: int  # of pages that no pin keeps yet
    pinned_bytes: int  # of all other pins
    bound_bytes: int
    why: str  # one sentence


class TierEngine(ABC):
    """A tier. Thread-safe: every method may be called from any thread.

    What has a body here is what a tier without anything of its own for it does.
    """

    tier = Tier.NVME

    @property
    def health(self) -> Health:
        return self.stats().health

    # ---- Lookups: memory only ----

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys a load could serve now; does not pin. False for all while the tier
        serves no loads, and when it is closed."""

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        """Count the leading keys that a load could serve now; does not pin.

        ``Stop.UNHEALTHY`` while the tier serves no loads, and when it is closed.
        """
        num_hits = [*self.contains(keys), False].index(False)
        if not num_hits and self.health is not Health.RUNNING:
            return LookupResult(0, Stop.UNHEALTHY)
        return LookupResult(num_hits, Stop.END if num_hits == len(keys) else Stop.MISS)

    def some_keys(self, limit: int) -> list[bytes]:
        """Return at most ``limit`` keys that a load could serve now, to measure the tier with;
        NVMe alone is asked."""
        return []

    # ---- Jobs ----

    @abstractmethod
    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        """Fill ``run.pages`` with the bytes stored under ``run.keys``, verified.

        A page whose length differs from the stored one is a ``MISS``; its buffer is untouched.
        The content of a buffer whose reason is not ``OK`` is undefined. Where pages come over a
        network the job is done ``deadline_s`` seconds from now, whatever the other side does: pages
        that did not arrive are ``IO_ERROR``.
        """

    def submit_store(self, run: Run) -> Job:
        """Queue the pages that are neither held nor on their way; the rest are duplicates, and all
        are in a tier that takes none.

        Where there is no room for all, the leading ones are taken and the others ``REJECTED``. One
        at least is taken by a tier that is well and has nothing queued. So a run of any size is
        stored by submitting again what was left of it, job after job.
        """
        job = Job(JobKind.STORE, run)
        job.reasons = [Reason.DUPLICATE] * run.num_pages
        job.finish()
        return job

    def flush(self, timeout_s: float) -> bool:
        """Return whether every page stored before the call is durable. False when the storage
        refuses, the time runs out or the tier is closed. Blocks."""
        return self.health is not Health.FAILED

    # ---- Erasing ----

    @abstractmethod
    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Erase pages: hidden on return, no pin keeps them any more, and what is on its way of them
        does not become visible. Memory only. Pages stored again after the call are found again.

        True once they do not come back after a crash or loss of power either, and no job that
        concerns them is under way. False when that is not known, because the storage refused or
        the tier is closed: ask again. It is not true before all that was asked before is.

        A tier that servers share erases for all of them, or without ``spread`` for this one alone:
        the server that told it makes it durable. ``local`` is what this server's own tier answered.
        """

    @abstractmethod
    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        """Continue under another namespace, as when a running server's weights are replaced. Pages
        of the old one stop being visible at once; jobs submitted before finish under it. Memory
        only. Without ``keep`` no process opens the old one again. Raises ``ValueError`` for a
        digest of the wrong length."""

    # ---- Books ----

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a consistent snapshot; O(1) and without I/O."""

    def tenants(self, limit: int) -> list[TenantUsage]:
        """Return the tenants with the most physical bytes, at most ``limit``. Takes no I/O, but
        time linear in their number: for an operator's request, not for every step."""
        return []

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming every term when the books do not balance. Call it while
        nothing is submitted."""

    @abstractmethod
    def close(self) -> None:
        """Finish running I/O, cancel what has not begun, release files. Idempotent."""
