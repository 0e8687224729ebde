"""``CostPublisher``: tells what a scheduler has learnt and how busy it is, on the scheduler thread.

It writes a record to the launcher's board at most every ``INTERVAL_S``, where the HTTP process
reads it: no question ever waits for a scheduler. A record takes constant time, however many
requests wait: every figure is one that is kept up to date anyway, but for one sum of a tensor.
"""

from __future__ import annotations

import bisect
import ipaddress
import logging
import re
import time
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from sglang.srt.disaggregation.kv_events import uses_dynamo_format
from sglang.srt.runtime_context import describe_kv_events_publisher, num_dp_ranks_of

from sglang_tiered.api import CallError
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
from sglang_tiered.sharing.addresses import Role, Serving
from sglang_tiered.storage.base import Health, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.admin.cost_board import CostBoard
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.cache.tiering import Tiering
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.sharing.peer_tier import PeerTier


NOT_PUBLISHED = (
    "no scheduler of this server has said what its loads cost: it is starting, or its model runs "
    "without the tiers, as its log says; ask again"
)
INTERVAL_S = 0.05
"""A router asks every quarter of a second; a record takes 17 microseconds, of decode 7 more."""

MAX_PROMPTS = 4096
"""Of a list, each of which has a room of its own: the number of the list and its place."""

TIERS_INTERVAL_S = 1.0
"""Of what takes locks of the tiers to know: their health, and what they hold."""

AFTER_ERROR_S = 60.0

_ROLES = {"null": "aggregated", "prefill": "prefill", "decode": "decode"}

logger = logging.getLogger(__name__)


def server_costs(
    board: CostBoard, config: TieredConfig, *, draining: bool, events: EventSource | None = None
) -> ServerCosts:
    """Return what the schedulers wrote last. Reads memory only. Raises ``CallError`` where nothing
    is learnt (404), and before the first record (503)."""
    problem = why_no_costs(config)
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


def abort_rooms(manager: Any, told: str) -> None:
    """Abort requests on prefill that decode will never ask for, by their clients' numbers with
    commas between them. They would wait a minute, as a mirrored request has no client."""
    numbers = [int(word) for word in told.split(",") if re.fullmatch("[0-9]{1,19}", word)]
    numbers.sort()
    for rid, state in list(manager.rid_to_state.items()) if numbers else ():
        room = getattr(state.obj, "bootstrap_room", None)
        if room is None or not state.dispatched:  # a request is aborted once, and not known yet
            continue
        at = bisect.bisect_right(numbers, room) - 1
        if at >= 0 and room - numbers[at] < MAX_PROMPTS:
            manager.abort_request(rid)


def event_source(settings: Any) -> EventSource | None:
    """Return where a server with these arguments (SGLang's) publishes KV events, None where it
    publishes none, or not over TCP."""
    told = describe_kv_events_publisher(settings)
    if told is None:
        return None
    return EventSource(
        told["endpoint_host"],
        told["endpoint_port_base"],
        told["topic"],
        told.get("replay_endpoint_port_base"),
        uses_dynamo_format(settings.kv_events_config),
    )


def num_local_ranks(settings: Any) -> int:
    """Return how many data-parallel replicas have their first rank on the first of the machines
    that ``settings`` (SGLang's, resolved, without a pipeline) spread them over."""
    num_ranks: int = num_dp_ranks_of(settings)
    if settings.dp_size > 1:  # SGLang spreads those over no machines
        return num_ranks
    num_machines: int = settings.nnodes
    return -(-num_ranks // num_machines)


def why_no_costs(config: TieredConfig) -> str | None:
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
        config = cache.config
        peers = None if config is None else config.peers
        nvme = None if config is None else config.nvme
        self._scheduler = scheduler
        self._cache = cache
        self._tiering: Tiering = cache.tiering
        self._board = board
        self._rank = rank
        self._always_loads = nvme is not None and nvme.always_load
        self._keyed = peers is not None and peers.keys_directory is not None
        self._interval_s = interval_s
        self._clock, self._wall_clock = clock, wall_clock
        self._due = self._tiers_due = clock()
        self._states: dict[Tier, _State] = {}
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
            prices, state = cast("tuple[float, float]", cost.prices), self._states.get(tier, _NONE)
            tiers[tier.value] = TierPrices(prices, cost.num_observed, *state)
        occupied = cache.cache_controller.prefetch_tokens_occupied
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
            always_loads=self._always_loads,
            keyed=self._keyed,
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
        nvme = stack.nvme.stats()
        held, most = nvme.physical_bytes, nvme.capacity_bytes
        self._states[Tier.NVME] = _state(nvme.health, held, most, nvme.stored_bytes)
        if stack.bucket is not None:
            bucket = stack.bucket.stats()
            held, most = bucket.physical_bytes, bucket.capacity_bytes
            self._states[Tier.OBJECT] = _state(bucket.health, held, most, held)
        peers = cast("PeerTier | None", stack.remote.get(Tier.PEER))
        if peers is not None:
            stats = peers.stats()
            held = stats.num_pages_mirrored * costs.page_tokens * costs.bytes_per_token
            self._states[Tier.PEER] = _state(stats.health, held, None, held)
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


_State = tuple[bool, int | None, int | None, int | None]
"""What ``TierPrices`` has behind its prices: whether loads are served, and bytes."""
_NONE: _State = (False, None, None, None)


def _state(health: Health, held: int, capacity: int | None, stored: int) -> _State:
    return health is Health.RUNNING, held, capacity, stored


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
