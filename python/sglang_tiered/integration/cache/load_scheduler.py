"""Loads from storage: which begin, how much of a prefix, and how long a request waits for one.

The part of ``TieredRadixCache`` between SGLang's prefetch calls and the planner. Every method runs
on the scheduler thread and none waits for a disk.

With several ranks every decision must come out the same on all of them, and what a rank's own
shard holds may differ after a crash, as may what it has measured. So with tensor parallelism each
rank makes its own plan and all load what the shortest plan says (``rank_consensus``), the window
works from token counts, which SGLang keeps equal on all ranks, and ends of waiting are reduced by
SGLang; with pipeline parallelism SGLang's own path runs unchanged.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_model
from sglang.srt.utils.rank_consensus_checker import assert_same

from sglang_tiered.config import TieredConfig
from sglang_tiered.integration.cache.immediate_query import answer_at_once
from sglang_tiered.integration.cache.load_planner import LoadPlanner
from sglang_tiered.integration.cache.prefill_prior import probe_prefill
from sglang_tiered.integration.cache.purge_exchange import INITIAL, RULES
from sglang_tiered.integration.cache.quiescing import QuiescingRadixCache
from sglang_tiered.integration.cache.rank_consensus import RankAgreement, Rule
from sglang_tiered.integration.identity.tenants import PurgedTenants
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.prefetch import PrefetchWindow

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, DecLockRefParams

    from sglang_tiered.storage.stack.tiers import Span

__all__ = ["AgreeingRadixCache", "LoadingRadixCache"]

MAX_ASKS_PER_STEP = 32
"""Put-off requests that are looked at in one step, in queue order: with a thousand of them waiting,
the step must not pay for each."""


def _gain_of(request: CacheRequestHandle) -> tuple[str, CacheRequestHandle]:
    """What ranks ask each other of a request whose load was put off."""
    return "gains by its turn", request


class AgreeingRadixCache(QuiescingRadixCache):
    """Lets a ``RankAgreement`` ride in the exchange of each scheduler step."""

    agreement: RankAgreement | None = None
    _is_boarding = False

    def agree_on(self, initial: Sequence[float], rules: Sequence[Rule]) -> RankAgreement:
        """Exchange these values, and questions, from the next step on."""
        # The groups that SGLang's exchange reduces over.
        attention = (self.attn_cp_group, self.attn_tp_group)
        groups = [group for group in attention if group is not None and group.size() > 1]
        if not groups and self.tp_world_size > 1:
            groups = [self.tp_group]
        self.agreement = RankAgreement(
            initial,
            rules,
            is_first=all(group.rank() == 0 for group in groups),
            is_alone=not groups and self.pp_size == 1,
        )
        return self.agreement

    def _sync_hicache_ready_counts(self) -> Any:
        self._is_boarding = self.agreement is not None and not self.agreement.is_alone
        try:
            return super()._sync_hicache_ready_counts()
        finally:
            self._is_boarding = False

    def _all_reduce(self, data: torch.Tensor, tp_reduce_op: Any) -> None:
        if not self._is_boarding or self.agreement is None:
            super()._all_reduce(data, tp_reduce_op)
            return
        self._is_boarding = False
        # Minima of other integers than these would not be ours to add to.
        assert data.dtype == torch.int64 and tp_reduce_op == torch.distributed.ReduceOp.MIN
        together = torch.cat([data, self.agreement.offer()])
        super()._all_reduce(together, tp_reduce_op)
        data.copy_(together[: len(data)])
        self.agreement.accept(together[len(data) :])
        assert_same("agreed on %s", self.agreement.agreed)


class LoadingRadixCache(AgreeingRadixCache):
    """See the module docstring."""

    # Set here because the parent's constructor calls ``reset`` before ours could run.
    _window: PrefetchWindow[str] | None = None  # by rid
    _planner: LoadPlanner[CacheRequestHandle] | None = None
    # One cache per process; the hooks on requests find it here.
    fence: ClassVar[PurgedTenants] = PurgedTenants()
    # In this step: of requests that wait for the other ranks' answer, and for their turn to load.
    _num_asks_left: list[int]
    _soonest_load_s: float | None = None  # of the loads under way, once asked for in this step

    # What was or will be loaded for a request that was not admitted yet: the prefix while it loads,
    # then how many tokens came and the lock of its host copies, oldest first.
    _loading_keys: dict[CacheRequestHandle, RadixKey]
    _loaded: dict[CacheRequestHandle, tuple[int, int, DecLockRefParams]]

    # Locks of host copies, by the request whose prefix prefill was promised.
    _promised: dict[CacheRequestHandle, tuple[int, DecLockRefParams]]

    def begin_loading(self, window_tokens: int) -> None:
        """Plan loads from now on; at most ``window_tokens`` are loading or wait to be used."""
        # SGLang compiles its hash of pages at first use, which no request should wait for.
        get_storage_hash_str(array("q", [0]), page_size=1)
        self._window = PrefetchWindow(window_tokens)
        self._planner = self._make_planner()
        self.agree_on(INITIAL, RULES)
        if self._decides_alone():
            answer_at_once(self.cache_controller)

    def _make_planner(self) -> LoadPlanner[CacheRequestHandle]:
        assert self.storage is not None
        page_size = int(self.page_size)
        bytes_per_token = max(1, self.storage.page_bytes() // page_size)
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        model = get_model()
        prefill = probe_prefill(
            model.model_path,
            model.revision,
            model.download_dir,
            dtype=getattr(pool, "dtype", torch.float16),
            device=str(self.device),
            num_ranks=int(self.tp_world_size * self.pp_size),
        )
        costs = CostModel(page_tokens=page_size, bytes_per_token=bytes_per_token, prefill=prefill)
        config = TieredConfig.from_environment()
        always = config is not None and config.nvme is not None and config.nvme.always_load
        planner: LoadPlanner[CacheRequestHandle] = LoadPlanner(
            costs, always=always, follows=self.storage.borrows
        )
        self.storage.use_planner(planner)
        return planner

    @property
    def storage(self) -> TieredStorage | None:
        """The attached NVMe tier; None in host mode, or while an operator has detached it."""
        backend = getattr(self.cache_controller, "storage_backend", None)
        return backend if isinstance(backend, TieredStorage) else None

    def _decides_alone(self) -> bool:
        """Whether no other rank must come to the same decisions."""
        return bool(self.tp_world_size == 1 and self.pp_size == 1)

    def prefetch_from_storage(
        self,
        request: CacheRequestHandle,
        last_host_node_id: int,
        new_input_tokens: list[int] | array[int],
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: list[int] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> bool | None:
        """Begin a load of what pays of what the tiers hold, now or in its turn.

        A scheduler that decides alone begins the load of a request that has just come at once; a
        cold request returns at once and is admitted in the same pass. Several ranks agree in the
        next step, for which the request is put off. So is a load that would overfill the window, or
        that waits for stores to leave it room, until ``check_prefetch_progress`` reaches the
        request again; SGLang drops it at that point, and with it the prefix, whenever more requests
        return together than half the host tier holds.
        """
        tokens = new_input_tokens
        is_new = False
        if self._window is not None and self._planner is not None and self.storage is not None:
            is_new = not self._planner.knows(request)
            self._window.withdraw(request.rid)
            num_before = len(matched_prefix_tokens or ())
            hashes, spans = self._held_pages(tokens, last_hash, extra_key, cache_salt)
            ends = self._restorable_ends(last_host_node_id, hashes)
            if ends is not None:
                hashes = hashes[: ends[-1] if ends else 0]
            num_planned = self._planner.arrives(
                request,
                num_held=len(hashes) * self.page_size,
                num_new=len(tokens) + 1,
                num_before=num_before,
                num_ahead=self.cache_controller.prefetch_tokens_occupied,
                spans=[(span.tier, span.num_pages * self.page_size) for span in spans],
                ends=None if ends is None else [end * self.page_size for end in ends],
            )
            self._probe_declined(hashes, spans, num_planned // self.page_size)
            tenant = self.fence.tenant_of(extra_key, cache_salt)
            self.storage.transfers.expect_load(hashes, tenant)
            num_held = self._agree(request, num_planned, num_before, len(tokens))
            if num_held is None:
                self._window.put_off(request.rid, 0)
                return None
            if num_held < self.prefetch_threshold:
                self._forget(request)
                return None
            has_room = self._window.has_room(num_held, self._num_loading_tokens())
            if not has_room or self.stores_in_the_way(request, num_held):
                self._window.put_off(request.rid, num_held)
                return None
            self._forget(request)
            if not self.has_host_path(last_host_node_id):
                return None
            tokens = tokens[: num_held + int(self.tree_core.is_eagle)]
        result: bool | None = super().prefetch_from_storage(
            request,
            last_host_node_id,
            tokens,
            last_hash,
            prefix_keys,
            matched_prefix_tokens,
            extra_key=extra_key,
            cache_salt=cache_salt,
            storage_hit_end=storage_hit_end,
        )
        if self._planner is not None and request in self.ongoing_prefetch:
            self._planner.begins(request)
            whole = array("q", matched_prefix_tokens or ()) + array("q", tokens)
            self._loading_keys[request] = RadixKey(
                whole, extra_key=extra_key, cache_salt=cache_salt
            )
            if is_new and self._decides_alone():
                # Between two steps; a repeated attempt may be in the middle of one.
                num_answered = self.cache_controller.prefetch_hit_queue.qsize()
                self._drain_storage_control_queues_impl(num_answered, 0, 0, 0, None, False)
        return result

    def has_host_path(self, node_id: int) -> bool:
        """Whether a load may be put below a node: SGLang drops it where the device alone holds what
        is above. Copies it to host memory if it can."""
        return True

    def stores_in_the_way(self, request: CacheRequestHandle, num_tokens: int) -> int:
        """Tokens whose stores a load of ``num_tokens`` waits for, since host memory has no room for
        it before; 0 if it may begin, and always with several ranks."""
        return 0

    def _agree(
        self, request: CacheRequestHandle, num_planned: int, num_before: int, num_tokens: int
    ) -> int | None:
        """What all ranks load of ``num_tokens`` behind ``num_before``; None until they agreed.

        They agree on where the load ends, for the match may have moved when the answer is there.
        """
        assert self.agreement is not None
        end = self.agreement.ask(request, num_before + num_planned)
        if end is None:
            return None
        num_agreed = min(max(0, end - num_before), num_tokens) // self.page_size * self.page_size
        assert_same("load of %s: %d tokens", request.rid, num_agreed)
        return int(num_agreed)

    def _forget(self, request: CacheRequestHandle) -> None:
        if self.agreement is not None:
            self.agreement.forget(request)
            self.agreement.forget(_gain_of(request))

    def _held_pages(
        self,
        tokens: list[int] | array[int],
        last_hash: str | None,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> tuple[list[str], list[Span]]:
        """The leading pages that the tiers could load now, and from where. Memory only."""
        key = RadixKey(
            tokens,
            extra_key=extra_key,
            is_bigram=self.tree_core.is_eagle,
            cache_salt=cache_salt,
        ).page_aligned(self.page_size)
        if len(key) == 0 or self.storage is None:
            return [], []
        hashes: list[str] = get_storage_hash_str(key, last_hash, page_size=self.page_size)
        spans = self.storage.lookup_spans(hashes)
        return hashes[: sum(span.num_pages for span in spans)], spans

    def _restorable_ends(self, node_id: int, hashes: list[str]) -> list[int] | None:
        """After how many of these pages below a node a load may end, in a model with states of
        sliding windows or Mamba, which lie at some places only; None if after any."""
        assert self.storage is not None
        num_tokens = len(hashes) * self.page_size
        states: list[Any] = []
        for kind in self.tree_components:
            if kind is BASE_COMPONENT_TYPE or not hashes:
                continue
            staging = self.components[kind].prepare_prefetch(node_id, prefetch_tokens=num_tokens)
            if staging.staging_tokens:
                states += self.tree_core.build_hicache_transfers(
                    kind,
                    node_id,
                    CacheTransferPhase.PREFETCH,
                    prefetch_tokens=num_tokens,
                    staging_tokens=staging.staging_tokens,
                )
        if not states:
            return None
        # SGLang loads no state for less than a window, except of a whole prompt.
        is_root = self.tree_core.is_root(node_id)
        shortest = 1 if is_root else max(len(state.keys) for state in states)
        ends = self.storage.batch_exists_v2(hashes, states).restorable_prefix_pages
        return [end for end in ends or () if end >= shortest]

    def _probe_declined(self, hashes: list[str], spans: list[Span], num_planned: int) -> None:
        """Measure the tier that a plan stopped short of, if nothing has for long."""
        end = 0
        for span in spans:
            start, end = end, end + span.num_pages
            if end > num_planned:
                assert self._planner is not None and self.storage is not None
                if self._planner.wants_probe(span.tier):
                    self.storage.transfers.probe(hashes[max(start, num_planned) : end], span.tier)
                return

    def _num_loading_tokens(self) -> int:
        """Host tokens taken by loads in flight and by loads no request has consumed yet."""
        loading: int = self.cache_controller.prefetch_tokens_occupied
        locked = {request: num_tokens for request, (num_tokens, *_) in self._loaded.items()}
        unconsumed: int = sum({**self.prefetch_loaded_tokens_by_reqid, **locked}.values())
        return loading + unconsumed

    def _handle_prefetch_result(self, operation: Any) -> None:
        """A load has ended: what came stays in host memory until its request is admitted. In a long
        queue it would be evicted before, by the loads of those behind it."""
        request = operation.handle
        key = self._loading_keys.pop(request, None)
        super()._handle_prefetch_result(operation)
        self._unlock_loaded(request)
        num_loaded = self.prefetch_loaded_tokens_by_reqid.get(request, 0)
        if key is None or num_loaded == 0:
            return
        node_id = self.match_prefix(MatchPrefixParams(key=key)).best_match_node
        if not self.tree_core.is_root(node_id) and self.tree_core.is_backuped(node_id):
            lock = self.inc_host_lock_ref(node_id).to_dec_params()
            self._loaded[request] = num_loaded, node_id, lock

    def _unlock_loaded(self, request: CacheRequestHandle) -> None:
        if request in self._loaded:
            self.dec_host_lock_ref(*self._loaded.pop(request)[1:])

    def unlock_last_loaded(self) -> bool:
        """Let what was loaded last be evicted before its request is admitted; False if nothing is
        locked."""
        if not self._loaded:
            return False
        self._unlock_loaded(next(reversed(self._loaded)))
        return True

    def finish_storage_prefetch_admission(
        self, request: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """The request was admitted: what it takes from host memory the copy to the device locks."""
        self._unlock_loaded(request)
        super().finish_storage_prefetch_admission(request, fulfilled_tokens, reason)

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        self._num_asks_left = [MAX_ASKS_PER_STEP, MAX_ASKS_PER_STEP]
        self._soonest_load_s = None

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether the request may be admitted now: nothing it waits for is still loading."""
        return self.load_has_ended(request) and not self._yields(request)

    def load_has_ended(self, request: CacheRequestHandle) -> bool:
        """Whether nothing of a request is loading or to be loaded any more."""
        if self._window is not None and self._window.is_put_off(request.rid):
            # Whoever waits only for the other ranks' answer must not wait behind loads.
            loads = self._window.num_tokens(request.rid) > 0
            if self._num_asks_left[loads] == 0:
                return False
            self._num_asks_left[loads] -= 1
            return not self._awaits_its_turn(request)
        has_ended: bool = super().check_prefetch_progress(request)
        return has_ended

    def _yields(self, request: CacheRequestHandle) -> bool:
        """Whether a request waits a moment for loads of others that are nearly there."""
        if self._planner is None or not self.ongoing_prefetch or not self._decides_alone():
            return False
        if self._soonest_load_s is None:
            under_way = [
                self._planner.left_s(handle)
                for handle, info in self.ongoing_prefetch.items()
                if info.operation.completed_tokens < info.operation.storage_hit_count
            ]
            self._soonest_load_s = min(under_way, default=math.inf)
        return self._planner.yields(request, self._soonest_load_s)

    def _awaits_its_turn(self, request: CacheRequestHandle) -> bool:
        """Whether a request whose load was put off goes on waiting; begins it when it has room."""
        assert self._window is not None
        num_tokens = self._window.num_tokens(request.rid)
        in_the_way = self.stores_in_the_way(request, num_tokens)
        if self.storage is None or (
            num_tokens > 0 and not self._gains_by_its_turn(request, in_the_way)
        ):
            self._window.withdraw(request.rid)
            self._forget(request)
            return False
        if in_the_way or not self._window.has_turn(request.rid, self._num_loading_tokens()):
            return True
        if not self._window.ask(request.rid):
            self._forget(request)
            return False
        # The scheduler repeats the load's request with a fresh match in its next pass.
        self.storage_prefetch_retries.refetch(request.rid)
        return True

    def _gains_by_its_turn(self, request: CacheRequestHandle, num_stored_first: int) -> bool:
        """Whether waiting still pays on every rank, as far as that is known: several ranks answer
        each other in the next step."""
        assert self._planner is not None and self.storage is not None and self.agreement is not None
        # A store is taken to last as long as a load.
        num_ahead = self.cache_controller.prefetch_tokens_occupied + num_stored_first
        gains = self.storage.serves_loads and self._planner.gains_by_its_turn(
            request, num_ahead=num_ahead
        )
        question = _gain_of(request)
        answer = self.agreement.ask(question, int(gains))
        if answer is not None:
            self.agreement.forget(question)
        return answer != 0

    def _prefetch_deadline_expired(self, operation: Any) -> bool:
        """Whether to start with what has arrived: computing the rest is sooner by now, or the tier
        stopped serving. Asked when the request could be admitted; SGLang reduces it over ranks."""
        expired: bool = super()._prefetch_deadline_expired(operation)
        if expired or self.storage is None or self._planner is None:
            return expired
        if not self.storage.serves_loads:
            return True
        is_read = operation.host_indices is not None
        num_planned = operation.storage_hit_count if is_read else operation.stats_requested_tokens
        num_missing = num_planned - operation.completed_tokens
        # With states of other components SGLang drops a load of which anything is missing.
        is_all_or_nothing = any(
            transfer.indices_from_pool != PoolName.KV for transfer in operation.pool_transfers or ()
        )
        lacks_states = is_all_or_nothing and not operation.pool_transfers_done
        if num_missing <= 0 and not lacks_states:
            return False
        occupied = self.cache_controller.prefetch_tokens_occupied
        return not self._planner.should_wait(
            operation.handle,
            num_missing=num_missing,
            num_before=operation.storage_start + operation.completed_tokens,
            num_ahead=0 if is_read else max(0, occupied - num_planned),
            is_read=is_read,
            num_lost=operation.completed_tokens if is_all_or_nothing else 0,
        )

    def pop_prefetch_loaded_span(self, request: CacheRequestHandle) -> tuple[int, int | None]:
        if self._planner is not None:
            self._planner.leaves(request)
        self._loading_keys.pop(request, None)
        span: tuple[int, int | None] = super().pop_prefetch_loaded_span(request)
        return span

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        self._forget(request)
        if self._window is not None:
            self._window.withdraw(request.rid)
        if self._planner is not None:
            self._planner.leaves(request)
        self._loading_keys.pop(request, None)
        self._unlock_loaded(request)
        super().release_aborted_request(request)

    # ---- The decode side of a handoff, see ``decode_loads`` ----

    @property
    def plans_loads(self) -> bool:
        return self._planner is not None

    def query_storage_hit_length(self, *args: Any, **kwargs: Any) -> int:
        """Nothing of our tier. SGLang's decode alone asks, to promise it before it is loaded."""
        if self.storage is not None:
            return 0
        return int(super().query_storage_hit_length(*args, **kwargs))

    @property
    def has_promised(self) -> bool:
        """Whether host copies are locked for requests."""
        return bool(self._promised)

    def lock_promised(self, request: CacheRequestHandle, node_id: int) -> None:
        """Keep the host copies up to a node, which a request is about to be promised."""
        self._promised[request] = node_id, self.inc_host_lock_ref(node_id).to_dec_params()

    def unlock_promised(self, waiting: Container[CacheRequestHandle]) -> None:
        """Let go of what is locked for other requests than those that still wait for it."""
        for request in [request for request in self._promised if request not in waiting]:
            self.dec_host_lock_ref(*self._promised.pop(request))

    def is_loading_or_waiting(self) -> bool:
        """Whether a load is under way or a request waits to be admitted."""
        has_waiting = self._planner is not None and self._planner.queue_wait_s > 0
        return bool(self.ongoing_prefetch) or has_waiting

    def forget_plan(self, request: CacheRequestHandle) -> None:
        """A load that no request waits for was begun."""
        self._loading_keys.pop(request, None)
        if self._window is not None:
            self._window.withdraw(request.rid)
        if self._planner is not None:
            self._planner.leaves(request)

    def note_batch(self, spans: list[tuple[int, int]], seconds: float) -> None:
        """A prefill batch of ``(new tokens, tokens before them)`` took so long."""
        if self._planner is not None:
            self._planner.note_batch(spans, seconds)

    def reset(self) -> None:
        super().reset()
        self._promised = {}
        self._loading_keys, self._loaded = {}, {}
        self._num_asks_left = [0, 0]
        if self._window is not None:
            self._window.clear()
        if self._planner is not None:
            self._planner.clear()
        if self.agreement is not None:
            self.agreement.forget_all()
