"""``Stories``: the notes of one scheduler on its requests, from the arrival of each to its end.

Moments and figures that are there anyway are noted. A line is made of them, and written, on another
thread (``request_writer``). Spans are made only where SGLang traces a request (``--enable-trace``).
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.observability.trace import TraceSliceContext, get_global_tracing_enabled
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.integration.observe.request_writer import LineWriter
from sglang_tiered.integration.observe.story import (
    End,
    LoadMeter,
    LookedUp,
    PricedPlan,
    Story,
)
from sglang_tiered.policy.both_ends import parts_of, spans_between
from sglang_tiered.request_log import rid_of
from sglang_tiered.storage.base import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.policy.cost_model import CostModel
    from sglang_tiered.request_log import Cause, Decision, RequestLogConfig, Why
    from sglang_tiered.storage.stack.tiers import Span

__all__ = ["PREFIX", "Stories", "open_notes", "tell_spans"]

MAX_STORIES = 65_536
"""Of requests that have come and not ended; beyond, the oldest is dropped."""

MAX_ABORTED = 1024
"""Requests that were aborted lately: SGLang may release one of them afterwards."""

TIERS = tuple(Tier)

PREFIX = "sglang_tiered."
"""How the attributes of spans begin."""

_OUTER, _INNER = 1, 2
"""Levels of SGLang's: of what a request waits for, and of its parts (``SGLANG_TRACE_LEVEL``)."""

_NS = 1e9

_Span = tuple[str, int, float, float, dict[str, Any]]


class Prices(Protocol):
    """The part of a planner that notes ask."""

    costs: CostModel

    @property
    def queue_wait_s(self) -> float: ...

    def tokens_ahead(self, num_ahead: int) -> tuple[int, ...]: ...


class Stories:
    """What those who work for requests say of them, by handle, in the order of their lives.
    Scheduler thread, but for ``meter_of``; none of the calls waits.

    ``tenant_of`` names the owner of an ``extra_key`` and a ``cache_salt``. Without a ``writer``
    stories are for traces, and where ``traces`` is false as well nothing is kept of a request."""

    def __init__(
        self,
        prices: Prices,
        writer: LineWriter | None,
        *,
        tenant_of: Callable[[str | None, str | None], bytes],
        traces: bool = False,
    ) -> None:
        self._prices = prices
        self._writer = writer
        self._tenant_of = tenant_of
        self._is_kept = traces or writer is not None
        self._stories: OrderedDict[Any, Story] = OrderedDict()  # by handle, or handle of a part
        self._starting: dict[Any, Story] = {}  # admitted, and no first token yet
        self._aborted: OrderedDict[int, None] = OrderedDict()  # hashes: a client names a request
        # Of requests that ended while their batch is not timed yet; None while no batch is at that.
        self._untimed: dict[Any, tuple[Story, End]] | None = None

    clock = staticmethod(time.perf_counter)

    def _is_unseen(self, of: Any) -> bool:
        """Whether nothing is kept of a request, or its handle: nobody asks, or it is none of a
        client's."""
        return not self._is_kept or bool(of.rid.startswith(HEALTH_CHECK_RID_PREFIX))

    # ---- Before it runs ----

    def arrives(self, scheduler: Any, req: Any) -> None:
        """Note that SGLang's request comes into the queue, or is looked up once more."""
        handle = req.cache_request_handle
        story = self._stories.get(handle)
        if story is None:
            if self._is_unseen(req):
                return
            story = self._open(handle)
            story.num_ahead = len(scheduler.waiting_queue)
            story.num_running = len(scheduler.running_batch.reqs)
        story.req = req

    def _open(self, handle: Any) -> Story:
        story = self._stories[handle] = Story(self.clock())
        story.queue_wait_s = self._prices.queue_wait_s
        if len(self._stories) > MAX_STORIES:
            self._stories.popitem(last=False)
        return story

    def looked_up(
        self, request: Any, began_at: float, *, num_before: int, num_new: int, spans: Sequence[Span]
    ) -> None:
        """Note that the tiers hold ``spans`` of pages of its ``num_new`` tokens behind
        ``num_before``."""
        story = self._stories.get(request)
        if story is None:
            if self._is_unseen(request):
                return
            story = self._open(request)  # of a decode server, whose queue is another
        if story.admitted_at is not None:
            return
        parts = tuple((span.tier, span.num_pages) for span in spans)
        page_tokens = self._prices.costs.page_tokens
        story.held = LookedUp(began_at, self.clock(), num_before, num_new, parts, page_tokens)
        story.num_lookups += 1
        if story.meter is None and parts:
            story.meter = LoadMeter(self.clock)

    def planned(
        self,
        request: Any,
        *,
        num_held: int,
        num_loaded: int,
        num_ahead: int,
        is_declined: bool,
        is_back: bool,
    ) -> None:
        """Note that all ranks together load so many of ``num_held`` tokens, behind ``num_ahead`` of
        others. ``is_declined``: none, since computing is sooner. ``is_back``: the last ones."""
        story = self._stories.get(request)
        if story is None or story.held is None or story.admitted_at is not None:
            return
        held, costs = story.held, self._prices.costs
        spans = [(TIERS.index(tier), pages * held.page_tokens) for tier, pages in held.parts]
        first = num_held - num_loaded if is_back else 0
        num_tiers = len(TIERS)
        all_held = parts_of(spans_between(spans, 0, num_held), num_tiers)
        loaded = parts_of(spans_between(spans, first, first + num_loaded), num_tiers)
        ahead = self._prices.tokens_ahead(num_ahead)
        decision: Decision = "load" if num_loaded >= num_held else "truncated"
        if not num_loaded:
            decision = "declined" if is_declined else "absent"
            self._waits_for(story, None)
        before, new = held.num_before, held.num_new

        def prefill_s(num_tokens: int, num_before: int) -> float:
            return costs.prefill.prices[0] + costs.prefill.seconds(num_tokens, num_before)

        story.plan = PricedPlan(
            at=self.clock(),
            decision=decision,
            parts={tier: n for tier, n in zip(TIERS, loaded, strict=True) if n},
            expected_s={
                tier: costs.transfers[at].seconds(n * costs.bytes_per_token)
                for at, (tier, n) in enumerate(zip(TIERS, loaded, strict=True))
                if n
            },
            is_back=is_back,
            load_s=costs.load_seconds(loaded, ahead) if num_loaded else 0.0,
            held_load_s=costs.load_seconds(all_held, ahead) if num_held else 0.0,
            held_prefill_s=costs.prefill.seconds(num_held, before) if num_held else 0.0,
            prefill_all_s=prefill_s(new, before),
            prefill_rest_s=prefill_s(new - num_loaded, before + num_loaded),
            queue_wait_s=story.queue_wait_s,
            num_tokens_ahead=num_ahead,
        )

    def put_off(self, request: Any, why: Why) -> None:
        """Note that its load waits for more than its turn."""
        story = self._stories.get(request)
        if story is not None and story.admitted_at is None:
            self._waits_for(story, why)

    def begun(self, request: Any) -> None:
        """Note that its load was queued."""
        story = self._stories.get(request)
        if story is not None and story.admitted_at is None:
            story.load_queued_at = self.clock()
            self._waits_for(story, "load")

    def _waits_for(self, story: Story, why: Why | None) -> None:
        """Note another reason to wait, or none; a wait that goes on is from now on for that."""
        if story.waiting_since is not None and why != story.waits_for:
            now = self.clock()
            story.stop_waiting(now)
            story.waiting_since = None if why is None else now
        story.waits_for = why

    def has_part(self, request: Any, part: Any) -> None:
        """Note that a part of its load has a handle of its own."""
        story = self._stories.get(request)
        if story is not None:
            story.parts.append(part)
            self._stories[part] = story

    def meter_of(self, request: Any) -> LoadMeter | None:
        """Return what is told of the reads for a request, or for a part of its load. Any thread."""
        story = self._stories.get(request)
        return story.meter if story is not None and story.may_load else None

    def given_up(self, request: Any, cause: Cause, num_tokens: int = 0) -> None:
        """Note that it starts without so many tokens that were to be loaded."""
        story = self._stories.get(request)
        if story is not None and story.given_up is None and story.may_load:
            story.given_up = cause, self.clock(), num_tokens
            self._waits_for(story, None)

    def load_ended(self, request: Any, num_loaded: int) -> None:
        """Note the end of its load, or of a part of it."""
        story = self._stories.get(request)
        if story is not None and story.load_queued_at is not None and story.may_load:
            story.load_ended_at = self.clock()
            story.num_loaded += num_loaded
            self._waits_for(story, None)

    def may_start(self, request: Any, is_ready: bool) -> None:
        """Note that its turn has come, and that it starts or waits on."""
        story = self._stories.get(request)
        if story is None:
            return
        if is_ready:
            if story.waiting_since is not None:
                story.stop_waiting(self.clock())
        elif story.waiting_since is None and story.may_load:
            story.waiting_since = self.clock()
            if story.admitted_at is not None:
                story.waits_for = "back"

    # ---- It runs ----

    def admitted(self, request: Any) -> None:
        """Note that it is in the next batch."""
        story = self._stories.get(request)
        if story is None or story.admitted_at is not None:
            return
        now = self.clock()
        story.stop_waiting(now)
        story.admitted_at = now
        self._starting[request] = story
        tell_spans(story, self._unix_minus_clock_s())

    def copied(self, req: Any, num_tokens: int) -> None:
        """Note that a copy of its tokens to the device was queued."""
        story = self._stories.get(req.cache_request_handle)
        if story is not None and num_tokens > 0:
            if story.copied_at is None:
                story.copied_at = self.clock()
            story.num_copied += num_tokens
            story.copy_bytes += num_tokens * self._prices.costs.bytes_per_token

    def batch_ran(
        self,
        reqs: Sequence[Any],
        spans: Sequence[tuple[int, int]],
        seconds: float,
        *,
        copies_beside: bool,
    ) -> None:
        """Note the end of a prefill batch of these requests, which took ``seconds``.
        ``copies_beside``: what it needed was copied to the device while it ran, and not before."""
        stories, now = self._stories, self.clock()
        self._hold_up({req.cache_request_handle for req in reqs}, seconds)
        for req, (num_new, num_before) in zip(reqs, spans, strict=False):
            story = stories.get(req.cache_request_handle)
            if story is None or story.is_prefilled:
                continue
            if story.prefill_ended_at is None:
                story.prefill_ended_at = now
            story.prefill_s += seconds
            story.num_batches += 1
            story.num_prefilled += num_new
            story.is_prefilled = num_before + num_new >= len(req.origin_input_ids)
            if story.copied_at is not None and story.copy_ended_at is None:
                story.copy_ended_at = max(story.copied_at, now - (not copies_beside) * seconds)
                tell_spans(story, self._unix_minus_clock_s())

    def _hold_up(self, handles: set[Any], seconds: float) -> None:
        """Charge a prefill batch to those that are between admission and first token, and are not
        in it. With overlap a batch's tokens come out only behind the launch of the next."""
        for handle, story in list(self._starting.items()):
            if handle in handles:
                continue
            if story.req is None or story.req.time_stats.prefill_finished_time:
                del self._starting[handle]
            else:
                story.others_s += seconds

    # ---- It ends ----

    @contextlib.contextmanager
    def until_timed(self) -> Iterator[None]:
        """Process the results of a batch, and time it, within this context. What is said of the
        requests that end there is complete only at its own end."""
        untimed: dict[Any, tuple[Story, End]] = {}
        self._untimed = untimed
        try:
            yield
        finally:
            self._untimed = None
            for handle, (story, end) in untimed.items():
                self._write(handle, story, end)

    def released(self, req: Any) -> None:
        """Note that it gives its memory back, at its end or to come again."""
        if not req.finished():
            return
        handle = req.cache_request_handle
        if self._untimed is not None and handle in self._untimed:
            return
        story = self._stories.get(handle)
        if story is None and (hash(handle) in self._aborted or self._is_unseen(req)):
            return
        reason = req.finished_reason.to_json().get("type", "")
        self._end(handle, story or Story(self.clock()), req, str(reason))

    def aborted(self, request: Any) -> None:
        """Note that it ended before it ran."""
        story = self._stories.get(request)
        if story is None or request in story.parts:
            return
        self._aborted[hash(request)] = None
        if len(self._aborted) > MAX_ABORTED:
            self._aborted.popitem(last=False)
        if story.req is None:  # of a decode server that never got to match it
            self._drop_story(request, story)
        else:
            self._end(request, story, story.req, "abort")

    def _end(self, handle: Any, story: Story, req: Any, reason: str) -> None:
        story.req = req
        now, offset_s = self.clock(), self._unix_minus_clock_s()
        story.stop_waiting(now)
        tell_spans(story, offset_s, is_over=True)
        if self._writer is None:
            self._drop_story(handle, story)
            return
        tenant = self._tenant_of(req.extra_key, req.cache_salt)
        times = req.time_stats  # of ``time.perf_counter``; 0.0 is never
        end = End(
            at=now,
            unix_minus_clock_s=offset_s,
            rid=rid_of(req.rid),
            reason=reason,
            tenant=tenant.hex() if any(tenant) else "",
            arrived_at=times.scheduler_recv_time or story.arrived_at,
            admitted_at=times.forward_entry_time or story.admitted_at,
            first_token_at=times.prefill_finished_time or None,
            num_prompt_tokens=len(req.origin_input_ids),
            num_output_tokens=len(req.output_ids),
            num_retractions=req.retraction_count,
            num_device=req.cached_tokens_device,
            num_host=req.cached_tokens_host,
            num_storage=req.cached_tokens_storage,
        )
        story.req = None  # its tokens need not wait for the disk
        if self._untimed is None:
            self._write(handle, story, end)
        else:
            self._untimed[handle] = story, end

    def _write(self, handle: Any, story: Story, end: End) -> None:
        self._drop_story(handle, story)
        if self._writer is not None:
            self._writer.put(story, end)

    def _drop_story(self, handle: Any, story: Story) -> None:
        self._stories.pop(handle, None)
        self._starting.pop(handle, None)
        for part in story.parts:
            self._stories.pop(part, None)
        story.parts.clear()  # their names, too, are as long as the client's

    def _unix_minus_clock_s(self) -> float:
        return time.time() - self.clock()

    @property
    def num_dropped(self) -> int | None:
        """Return the lines that were lost; None where none is written."""
        return None if self._writer is None else self._writer.num_dropped

    def close(self) -> None:
        """Write what is left. Waits for the disk."""
        if self._writer is not None:
            self._writer.close()


def open_notes(
    config: RequestLogConfig | None,
    prices: Prices,
    tenant_of: Callable[[str | None, str | None], bytes],
) -> Stories:
    """Return stories that write lines if ``config`` says where, and tell spans if SGLang traces. Of
    the ranks that take part in the same batches the one that receives the requests writes; in a
    trace each has spans of its own."""
    place = get_parallel()
    writer = None
    if config is not None and not (place.attn_tp_rank or place.attn_cp_rank):
        replica = place.attn_dp_rank if place.dp_rank is None else place.dp_rank
        path = config.file_of(replica)
        writer = LineWriter(path, max_bytes=config.max_bytes, replica=replica)
    return Stories(prices, writer, tenant_of=tenant_of, traces=bool(get_global_tracing_enabled()))


def tell_spans(story: Story, unix_minus_clock_s: float, *, is_over: bool = False) -> None:
    """Add the spans that are complete and were not told yet to a request's trace. ``is_over``: no
    more will come. Scheduler thread."""
    context = None if story.req is None else story.req.time_stats.trace_ctx
    if context is None or not context.tracing_enable:
        return
    for name, level, began, ended, attributes in _spans(story, is_over=is_over):
        if (name, began) in story.told:
            continue
        story.told.add((name, began))
        context.trace_slice(
            TraceSliceContext(
                slice_name=f"tier_{name}",
                start_time_ns=int((began + unix_minus_clock_s) * _NS),
                end_time_ns=int((ended + unix_minus_clock_s) * _NS),
                level=level,
                attrs={PREFIX + key: value for key, value in attributes.items()},
            )
        )


def _spans(story: Story, *, is_over: bool) -> Iterator[_Span]:
    """Yield the name, level, begin, end and attributes of each span that is complete."""
    held = story.held
    if held is not None:
        pages = {f"num_{tier.value}_pages": count for tier, count in held.parts}
        yield "lookup", _INNER, held.began_at, held.ended_at, pages
    for why, began, ended in story.waits:
        yield "wait", _OUTER, began, ended, {"why": why}
    # Of what loads while the front of its prompt is computed, one part ends after the other.
    has_ended = story.load_ended_at is not None or story.given_up is not None
    is_new = ("load", story.load_queued_at) not in story.told  # its reads are many
    if story.load_queued_at is not None and is_new and (is_over or has_ended and not story.parts):
        yield from _load_spans(story, story.load_queued_at)
    if story.copied_at is not None and story.copy_ended_at is not None:
        copied = {"num_tokens": story.num_copied, "num_bytes": story.copy_bytes}
        yield "copy", _OUTER, story.copied_at, story.copy_ended_at, copied


def _load_spans(story: Story, queued_at: float) -> Iterator[_Span]:
    plan, given_up = story.plan, story.given_up
    ended_at = story.load_ended_at or (queued_at if given_up is None else given_up[1])
    attributes: dict[str, Any] = {"num_loaded_tokens": story.num_loaded}
    if plan is not None:
        attributes |= {"num_tokens": sum(plan.parts.values()), "expected_s": plan.load_s}
    if given_up is not None:
        attributes["given_up"] = given_up[0]
    yield "load", _OUTER, queued_at, ended_at, attributes
    for tier, reading in story.readings().items():
        figures: dict[str, Any] = {
            "tier": tier.value,
            "num_bytes": reading.num_bytes,
            "num_reads": reading.num_reads,
            "num_failed_pages": reading.failed.total(),
        }
        yield "read", _INNER, reading.begun_at, reading.ended_at, figures
        if reading.verified is not None:
            checked = {"tier": tier.value, "thread_s": reading.verify_s}
            yield "verify", _INNER, *reading.verified, checked
