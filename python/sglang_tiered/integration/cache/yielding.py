"""``Yielding``: the hooks into SGLang's admission by which a request meets its back, which
``Returns`` loads."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import split_cached_prefix_by_tier
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_tiered.integration.cache.returns import HANDLE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.integration.cache.loads import Loads
    from sglang_tiered.integration.cache.returns import Returns


MAX_PASSED = 8
"""Requests that others may pass in one pass, since a chunk of theirs would be the second one."""

_NUM_PASSED = "_sglang_tiered_num_passed"  # of SGLang's adder, which is one of a pass

logger = logging.getLogger(__name__)


class SegmentFilter(logging.Filter):
    """Drops SGLang's line on every load that ends, where it is a part of one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or f"req={HANDLE_PREFIX}" not in record.getMessage()


def _returns_of(cache: Any) -> Returns | None:
    tiering = getattr(cache, "tiering", None)
    return None if tiering is None else tiering.returns


def _reason_against(scheduler: Any) -> str | None:
    """Return what a server does with which a request cannot yield between its chunks."""
    cache = scheduler.tree_cache
    reasons = {
        "prefill and decode are apart": scheduler.disaggregation_mode
        is not DisaggregationMode.NULL,
        "prefill is not chunked": scheduler.chunked_prefill_size is None,
        "it speculates": not scheduler.spec_algorithm.is_none(),
        "the model's states lie at some places only": len(cache.tree_components) > 1,
        "the host tier is smaller than device memory": cache.has_small_host,
        "host memory is written back": cache.is_write_back,
        "chunks are aligned": scheduler.truncation_align_size is not None,
        "requests may preempt others": scheduler.enable_priority_preemption,
        "requests may wait for so long only": envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0,
        "it is a diffusion model": scheduler.dllm_config is not None,
        "the model makes embeddings": not scheduler.is_generation,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _is_on(scheduler: Any) -> bool:
    """Whether the operator wants prefixes to be computed from both ends, and the server can."""
    config = scheduler.tree_cache.config
    if config is None or config.nvme is None or not config.nvme.both_ends:
        return False
    reason = _reason_against(scheduler)
    if reason is not None:
        logger.info("Nothing is loaded from its back while its front is computed: %s.", reason)
    return reason is None


def _may_yield(req: Any) -> bool:
    """Whether what a request has computed is in the tree after each chunk, and nowhere else. And
    whether nothing is wanted of it that only one prefill without a gap gives."""
    return not (
        req.skip_radix_cache_insert
        or (req.return_logprob and req.logprob_start_len >= 0)
        or req.return_hidden_states
        or req.return_routed_experts
        or req.return_indexer_topk
        or req.session is not None
        or req.beam_group is not None
        or req.input_embeds is not None
        or req.token_indices_to_pool is not None
        or req.retracted_stain
    )


def _drop_hits(adder: Any, req: Any, prefix_len: int) -> None:
    """Take what a request had before it yielded from a batch's hits by tier, nearest first."""
    hits = split_cached_prefix_by_tier(
        prefix_len=prefix_len,
        host_hit_len=req.materialized_host_hit_len(),
        storage_hit_len=req.storage_hit_length,
        storage_hit_start=req.storage_hit_start,
        host_hit_is_storage=req.host_hit_is_storage,
    )
    num_left = req.already_computed
    for tier, num_tokens in zip(("device", "host", "storage"), hits, strict=True):
        num_taken = min(num_left, num_tokens)
        num_left -= num_taken
        name = f"log_{tier}_hit_tokens"
        setattr(adder, name, getattr(adder, name) - num_taken)


class Yielding:
    """The hooks of one process."""

    def __init__(self) -> None:
        self._is_on: bool | None = None  # None until a scheduler was looked at

    def comes(self, scheduler: Any, req: Any, loads: Loads[Any]) -> None:
        """Allow the request whose load is planned next."""
        if self._is_on is None:
            self._is_on = _is_on(scheduler)
        # An operator may change the threshold of a running server. From 2 on, what was computed
        # once gets no host copy, below which a back could hang.
        has_copies = scheduler.tree_cache.write_through_threshold <= 1
        record = loads.of(req.cache_request_handle)
        record.may_yield = self._is_on and has_copies and _may_yield(req)
        record.has_run = req.already_computed > 0

    def around_select(
        self, original: Callable[..., Any], adder: Any, req: Any, **named: Any
    ) -> Any:
        verdict = original(adder, req, **named)
        returns = _returns_of(adder.tree_cache)
        if returns is None or isinstance(verdict, AddReqResult):
            return verdict
        # Of what it computed before it yielded, a part may be gone, and its record with it.
        req.already_computed = min(req.already_computed, verdict.prefix_len)
        req.kv.cache_inserted_len = min(req.kv.cache_inserted_len, verdict.prefix_len)
        # SGLang tracks one unfinished chunk, and a chunk that ends early leaves room for another.
        has_chunked = named.get("has_chunked_req") or adder.new_chunked_req is not None
        if verdict.is_chunked and has_chunked:
            return self._wait(adder, req)
        if req.cache_request_handle in returns:
            end = returns.end_of_chunk(req, verdict.prefix_len)
            if end is not None and verdict.prefix_len + verdict.extend_len > end:
                verdict = dataclasses.replace(
                    verdict, extend_len=end - verdict.prefix_len, max_new_tokens=0, is_chunked=True
                )
        return self._wait(adder, req) if verdict.is_chunked and has_chunked else verdict

    def _wait(self, adder: Any, req: Any) -> AddReqResult:
        """Have a request wait until another one is done with its chunks, but those behind it only
        once some wait like this: each costs a match. Of a LoRA adapter that is refused SGLang takes
        note as of one that runs."""
        num_passed = getattr(adder, _NUM_PASSED, 0) + 1
        setattr(adder, _NUM_PASSED, num_passed)
        may_pass = num_passed <= MAX_PASSED and req.lora_id is None
        return AddReqResult.CONTINUE if may_pass else AddReqResult.OTHER

    def around_add_chunked(self, original: Callable[..., Any], adder: Any, req: Any) -> Any:
        returns = _returns_of(adder.tree_cache)
        if returns is None or req.cache_request_handle not in returns:
            return original(adder, req)
        end = returns.end_of_chunk(req, req.prefix_len)
        if end is not None:
            limit = end - req.prefix_len
            own = adder.chunked_req_limit
            adder.chunked_req_limit = limit if own is None else min(limit, own)
        rest = original(adder, req)
        if rest is None:
            returns.admitted(req, is_chunked=False)
        return rest

    def after_commit(self, _: Any, adder: Any, req: Any, admission: Any, *__: Any) -> None:
        returns = _returns_of(adder.tree_cache)
        if returns is None or req.cache_request_handle not in returns:
            return
        if req.already_computed:
            # SGLang counts a request's tiers once, as it is first admitted, and a batch's hits
            # each time: what the request had before it yielded is none of this batch's.
            req.cached_tokens_storage += admission.prefix_len - req.already_computed
            adder.log_hit_tokens -= req.already_computed
            _drop_hits(adder, req, admission.prefix_len)
        returns.admitted(req, is_chunked=admission.is_chunked)

    def after_stash(self, _: Any, scheduler: Any, req: Any) -> None:
        returns = _returns_of(scheduler.tree_cache)
        if returns is not None:
            returns.chunk_ended(scheduler, req)
