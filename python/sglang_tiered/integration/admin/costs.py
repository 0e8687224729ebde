"""What a server tells routers of its costs: ``CostPublisher`` writes in a scheduler, and the HTTP
process reads (``server_costs``), by way of a ``CostBoard``. No question waits for a scheduler.

A board is anonymous shared memory of the launcher, which its children open through ``/proc``.
Nothing is left behind, however the server ends, and neither side ever waits for the other. Every
replica has two places and writes into them in turn, so the record before is whole while the next
one is written. A record is sealed with a checksum, so half a one is not taken for one.

A record is written at most every ``INTERVAL_S``, and takes constant time, however many requests
wait. Every figure is one that is kept up to date anyway, but for one sum of a tensor.
"""

from __future__ import annotations

import ipaddress
import logging
import mmap
import os
import secrets
import struct
import time
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

import msgspec
from sglang.srt.runtime_context import num_dp_ranks_of

from sglang_tiered.api import CallError
from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.config import TierMode
from sglang_tiered.policy.server_costs import (
    DecodeLoad,
    EventSource,
    PrefillPrices,
    RankCosts,
    Room,
    ServerCosts,
    TierPrices,
    Waiting,
)
from sglang_tiered.sharing.settings import Role, Serving
from sglang_tiered.storage.base import Health, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.sharing.peer_tier import PeerTier


ENVIRONMENT_VARIABLE = "SGLANG_TIERED_COSTS"
"""Where the children of a launcher find its board."""

PLACE_BYTES = 4096
"""A record takes about 1 kB."""

INTERVAL_S = 0.05
"""A router asks every quarter of a second; a record takes 17 microseconds, of decode 7 more."""

TIERS_INTERVAL_S = 1.0
"""Of what takes locks of the tiers to know: their health, and what they hold."""

AFTER_ERROR_S = 60.0

NOT_PUBLISHED = (
    "no scheduler of this server has said what its loads cost: it is starting, or its model runs "
    "without the tiers, as its log says; ask again"
)

_NAME = "sglang-tiered-costs"
_LENGTH = struct.Struct("<I")
_ROLES = {"null": "aggregated", "prefill": "prefill", "decode": "decode"}

_Entry = tuple[int, float, RankCosts]
"""A record behind its number and the time of the snapshot by the machine's monotonic clock."""

logger = logging.getLogger(__name__)


class CostBoard:
    """Of ``num_ranks`` data-parallel replicas. One process writes the records of a rank, any number
    of processes of the same user reads them. Owned by the launcher; closing it there leaves what
    others have opened."""

    def __init__(self, descriptor: int, num_ranks: int, boot: str) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _size(num_ranks))
        self.num_ranks = self.num_local_ranks = num_ranks
        self.boot = boot
        self._num_written = 0

    @classmethod
    def of_server(cls, settings: Any) -> CostBoard:
        """Make the board of a server with these arguments (SGLang's, resolved, no pipeline)."""
        num_ranks = num_dp_ranks_of(settings)
        # SGLang spreads the replicas of --dp-size over no machines.
        num_machines = 1 if settings.dp_size > 1 else settings.nnodes
        return cls.create(num_ranks, -(-num_ranks // num_machines))

    @classmethod
    def create(cls, num_ranks: int, num_local_ranks: int | None = None) -> CostBoard:
        """Make an empty board. ``num_local_ranks`` (all) have their first rank on this machine, and
        can reach it. Raises ``OSError`` where the system has none."""
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, _size(num_ranks))
        board = cls(descriptor, num_ranks, secrets.token_hex(16))
        board.num_local_ranks = num_local_ranks or num_ranks
        return board

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> CostBoard | None:
        """Open the launcher's board; None in a process without one, as on other machines."""
        told = environment.get(ENVIRONMENT_VARIABLE)
        if not told:
            return None
        path, num_ranks, boot = told.split(":")
        try:
            # The launcher may have ended, and its number be another process's by now.
            is_board = os.readlink(path).startswith(f"/memfd:{_NAME} ")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC) if is_board else -1
        except OSError as error:
            logger.warning("costs are not published: %s cannot be opened (%s)", path, error)
            return None
        if is_board and os.fstat(descriptor).st_size == _size(int(num_ranks)):
            return cls(descriptor, int(num_ranks), boot)
        if is_board:
            os.close(descriptor)
        logger.warning("costs are not published: %s is no board of this server", path)
        return None

    def to_environment(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Tell the children of this process where to find it, as long as this process lives."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        environment[ENVIRONMENT_VARIABLE] = f"{path}:{self.num_ranks}:{self.boot}"

    def write(self, costs: RankCosts, clock_s: float) -> None:
        """Replace the record of ``costs.rank``, of a snapshot taken at ``clock_s`` of
        ``time.monotonic``. Raises ``ValueError`` for a record without a place."""
        self._num_written += 1
        data = seal((self._num_written, clock_s, costs))
        if costs.rank >= self.num_ranks or len(data) > PLACE_BYTES - _LENGTH.size:
            raise ValueError(
                f"there is no place for {len(data)} bytes of rank {costs.rank}: the board has "
                f"{self.num_ranks} ranks of {PLACE_BYTES} bytes"
            )
        start = _start(costs.rank, self._num_written % 2)
        _LENGTH.pack_into(self._memory, start, len(data))
        start += _LENGTH.size
        self._memory[start : start + len(data)] = data

    def read(self, clock: Callable[[], float] = time.monotonic) -> tuple[RankCosts, ...]:
        """Return the last record of every rank that has written one, each with its age."""
        entries = []
        for rank in range(self.num_ranks):
            found = [self._entry(_start(rank, turn)) for turn in range(2)]
            whole = [entry for entry in found if entry is not None]
            entries += sorted(whole, key=lambda entry: entry[0])[-1:]
        now = clock()
        return tuple(
            msgspec.structs.replace(costs, age_s=max(0.0, now - clock_s))
            for _, clock_s, costs in entries
        )

    def _entry(self, start: int) -> _Entry | None:
        (length,) = _LENGTH.unpack_from(self._memory, start)
        start += _LENGTH.size
        data = self._memory[start : start + min(length, PLACE_BYTES)]
        return unseal(data, cast("type[_Entry]", _Entry))

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        if self._descriptor >= 0:
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(num_ranks: int) -> int:
    return 2 * num_ranks * PLACE_BYTES


def _start(rank: int, turn: int) -> int:
    return (2 * rank + turn) * PLACE_BYTES


def server_costs(
    board: CostBoard, config: TieredConfig, *, draining: bool, events: EventSource | None = None
) -> ServerCosts:
    """Return what the schedulers wrote last. Reads memory only. Raises ``CallError`` where nothing
    is learnt (404), and before the first record (503)."""
    problem = _why_no_costs(config)
    if problem is not None:
        raise CallError(problem, 404)
    ranks = board.read()
    if not ranks:
        raise CallError(NOT_PUBLISHED, 503)
    return ServerCosts(
        draining=draining,
        num_ranks=board.num_ranks,
        num_local_ranks=board.num_local_ranks,
        ranks=ranks,
        events=events,
    )


def _why_no_costs(config: TieredConfig) -> str | None:
    """Return why no scheduler with this configuration learns costs, in one sentence; None if they
    do."""
    if config.mode is not TierMode.NVME:
        return (
            f"this server learns no costs with --tier-mode {config.mode.value}; start it with "
            "--tier-mode nvme"
        )
    if config.pp_size > 1:
        return (
            f"this server learns no costs with --pp-size {config.pp_size}, as SGLang plans the "
            "loads of a pipeline; start it with --pp-size 1"
        )
    return None


class CostPublisher:
    """Of the scheduler that receives the requests of one data-parallel replica. ``scheduler`` and
    ``cache`` are its own; the cache must have a ``Tiering``."""

    def __init__(
        self,
        scheduler: Any,
        cache: TieredRadixCache,
        board: CostBoard,
        *,
        rank: int,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        assert cache.tiering is not None
        self._scheduler, self._cache, self._tiering = scheduler, cache, cache.tiering
        self._board, self._rank, self._interval_s = board, rank, interval_s
        self._clock, self._wall_clock = clock, wall_clock
        self._due = self._tiers_due = clock()
        # What ``TierPrices`` has behind its prices: whether loads are served, and bytes.
        self._states: dict[Tier, tuple[Any, ...]] = {}
        self._namespace = ""
        self._announced: PeerTier | None = None  # which tells others where this server is
        self._role = ""  # and what it does, which may be switched
        self._was_quiet = False  # what the last record says
        self._has_failed = False

    def publish_if_due(self, expected_s: float = 0.0) -> None:
        """Write a record, unless the last one is younger than the interval. ``expected_s``: how
        long this thread will be away; when that is longer than the interval, it writes anyway."""
        now = self._clock()
        if now >= self._due or (expected_s >= self._interval_s and not self._has_failed):
            self._publish(now)

    def rests(self) -> None:
        """Write a record before the scheduler rests, if the last one says that it has work. Asked
        again and again while nothing can run."""
        if not self._was_quiet and not self._has_failed:
            self._publish(self._clock(), only_if_quiet=True)

    def _publish(self, now: float, *, only_if_quiet: bool = False) -> None:
        try:
            is_quiet = self._is_quiet()
            if only_if_quiet and not is_quiet:
                return
            self._due = now + self._interval_s
            self._board.write(self.take(), now)
            self._was_quiet, self._has_failed = is_quiet, False
        except Exception:
            self._due, self._has_failed = now + AFTER_ERROR_S, True  # or it would in every step
            logger.exception("internal error: no costs are published for %.0f s", AFTER_ERROR_S)

    def _is_quiet(self) -> bool:
        """Whether there is nothing to do."""
        scheduler = self._scheduler
        return (
            self._tiering.planner.num_waiting == 0
            and not scheduler.running_batch.reqs
            and scheduler.chunked_req is None
            and _num_waiting(scheduler) == 0
            and not self._tiering.work.is_running
        )

    def take(self) -> RankCosts:
        """Take a record now. Scheduler thread."""
        scheduler, cache, planner = self._scheduler, self._cache, self._tiering.planner
        costs, now = planner.costs, self._clock()
        role = _ROLES[scheduler.disaggregation_mode.value]
        if now >= self._tiers_due or role != self._role:
            if role != self._role:
                self._role, self._announced = role, None
            self._tiers_due = now + TIERS_INTERVAL_S
            self._look_at_tiers(cache.storage)
        num_used, _ = scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
        host = cache.cache_controller.mem_pool_host
        tiers = {}
        for tier, cost in zip(Tier, costs.transfers, strict=True):
            prices, state = cast("tuple[float, float]", cost.prices), self._states.get(tier)
            tiers[tier.value] = TierPrices(prices, cost.num_observed, *(state or (False,)))
        config, occupied = cache.config, cache.cache_controller.prefetch_tokens_occupied
        nvme, peers = (None, None) if config is None else (config.nvme, config.peers)
        return RankCosts(
            at=self._wall_clock(),
            boot=self._board.boot,
            rank=self._rank,
            role=role,
            bootstrap_port=_bootstrap_port(scheduler),
            computes_on=scheduler.server_args.device or "",
            namespace=self._namespace,
            attached=cache.storage is not None,
            server="" if self._announced is None else self._announced.server,
            pages_at="" if self._announced is None else self._announced.address,
            page_tokens=costs.page_tokens,
            kv_bytes_per_token=costs.bytes_per_token,
            prefill=PrefillPrices(
                cast("tuple[float, float, float, float]", costs.prefill.prices),
                costs.prefill.num_observed,
            ),
            tiers=tiers,
            always_loads=nvme is not None and nvme.always_load,
            keyed=peers is not None and peers.keys_directory is not None,
            queue_wait_s=max(0.0, planner.wait_behind_batch_s),
            running_prefill_s=self._tiering.work.left_s(now) + self._later_chunks_s(),
            service_s=planner.service_s,
            num_others=planner.num_others(),
            busy=self._tiering.work.busy_share(now),
            ahead_tokens=cast("tuple[int, int, int]", planner.tokens_ahead(max(0, occupied))),
            waiting=Waiting(_num_waiting(scheduler), planner.num_waiting_tokens),
            decode=DecodeLoad(
                len(scheduler.running_batch.reqs),
                scheduler.max_running_requests,
                tuple(scheduler.decode_moment_totals),
                _decode_tokens(scheduler, num_used) if role == "decode" else None,
            ),
            device=Room(max(0, num_used), scheduler.max_total_num_tokens),
            host=Room(max(0, host.logical_size - host.available_size()), host.logical_size),
        )

    def _later_chunks_s(self) -> float:
        """Return the expected time of what a request in chunks has still to compute, behind the
        chunk that runs."""
        request = self._scheduler.chunked_req
        if request is None:
            return 0.0
        num_left = max(0, request.seqlen - request.extend_end)
        return self._tiering.planner.costs.prefill.seconds(num_left, request.extend_end)

    def _look_at_tiers(self, storage: TieredStorage | None) -> None:
        """Take what changes slowly. Memory only, but for locks that tiers hold for a moment."""
        self._states.clear()
        self._namespace = "" if storage is None else storage.namespace.hex()
        if storage is None:
            self._announced = None
            return
        stack, costs = storage.stack, self._tiering.planner.costs

        def note(tier: Tier, health: Health, held: int, most: int | None, stored: int) -> None:
            self._states[tier] = health is Health.RUNNING, held, most, stored

        nvme = stack.nvme.stats()
        held, most = nvme.physical_bytes, nvme.capacity_bytes
        note(Tier.NVME, nvme.health, held, most, nvme.stored_bytes)
        if stack.bucket is not None:
            bucket = stack.bucket.stats()
            held, most = bucket.physical_bytes, bucket.capacity_bytes
            note(Tier.OBJECT, bucket.health, held, most, held)
        peers = cast("PeerTier | None", stack.remote.get(Tier.PEER))
        if peers is not None:
            stats = peers.stats()
            held = stats.num_pages_mirrored * costs.page_tokens * costs.bytes_per_token
            note(Tier.PEER, stats.health, held, None, held)
            if peers is not self._announced:
                self._announce(peers)
        self._announced = peers

    def _announce(self, peers: PeerTier) -> None:
        """Have the Redis say where this server answers HTTP, and in which role."""
        settings, rank = self._scheduler.server_args, self._rank
        if settings.node_rank != 0:
            return  # another machine has the HTTP endpoint
        role, port = Role[self._role.upper()], _bootstrap_port(self._scheduler) or 0
        host, http_port, is_tls = settings.host, settings.port, bool(settings.ssl_certfile)

        def serving(address: str) -> Serving:
            url = serving_url(host, http_port, is_tls=is_tls, peer_address=address)
            return Serving(url, role, rank, port)

        peers.announce_serving(serving)


def serving_url(host: str, port: int, *, is_tls: bool, peer_address: str) -> str:
    """Return the URL of a server that listens on ``host``: for one that stands for every address,
    the host of ``peer_address``, ``tcp://host:port``, at which others find its pages."""
    try:
        address = ipaddress.ip_address(host.strip("[]") or "0.0.0.0")
    except ValueError:
        shown = host  # a name
    else:
        shown = f"[{address}]" if address.version == 6 else str(address)
        if address.is_unspecified:
            shown = urlsplit(peer_address).netloc.rpartition(":")[0]
    return f"{'https' if is_tls else 'http'}://{shown}:{port}"


def _bootstrap_port(scheduler: Any) -> int | None:
    """Return where decode finds this prefill server; None in another role."""
    is_prefill = scheduler.disaggregation_mode.value == "prefill"
    return scheduler.server_args.disaggregation_bootstrap_port if is_prefill else None


def _num_waiting(scheduler: Any) -> int:
    """Return how many requests wait, those that wait for the other side of a handoff included."""
    num = len(scheduler.waiting_queue)
    if scheduler.disaggregation_mode.value == "prefill":
        num += len(scheduler.disagg_prefill_bootstrap_queue.queue)
    if scheduler.disaggregation_mode.value == "decode":
        num += len(scheduler.disagg_decode_prealloc_queue.queue)
        num += len(scheduler.disagg_decode_transfer_queue.queue)
    return num


def _decode_tokens(scheduler: Any, num_used: int) -> int | None:
    """Return the tokens of the running batch, with those that decode keeps free for each request
    when it takes another one; None where lengths are not on the host. A prefix that requests share
    is held once: they take no more than all that is used."""
    batch = scheduler.running_batch
    if not batch.reqs:
        return 0
    if batch.seq_lens_cpu is None:
        return None
    kept: int = scheduler.server_args.num_reserved_decode_tokens
    return min(int(batch.seq_lens_cpu.sum()), max(0, num_used)) + kept * len(batch.reqs)
