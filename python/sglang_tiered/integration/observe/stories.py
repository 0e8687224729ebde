"""``Stories``: the notes of one scheduler on its requests, from the arrival of each to its end.

Moments and figures that are there anyway are noted. A line is made of them, and written, on another
thread (``LineWriter``). Spans are made only where SGLang traces a request (``--enable-trace``).
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.observability.trace import TraceSliceContext, get_global_tracing_enabled
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.integration.observe.story import LineWriter, LoadMeter, Story
from sglang_tiered.policy.both_ends import parts_of, spans_between
from sglang_tiered.request_log import (
    Copy,
    GivenUp,
    Load,
    Lookup,
    Plan,
    Prefill,
    Sources,
    rid_of,
)
from sglang_tiered.storage.base import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.policy.cost_model import CostModel
    from sglang_tiered.request_log import Cause, Decision, RequestLogConfig, Why
    from sglang_tiered.storage.base import Span


MAX_STORIES = 65_536
"""Of requests that have come and not ended; beyond, the oldest is dropped."""

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
        self._prefill_s = 0.0  # of all batches
        # SGLang may release a request that was aborted before, or twice.
        self._ended: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unwritten: dict[Any, Story] = {}  # ended in this step, whose batch may not be timed

    clock = staticmethod(time.perf_counter)

    def _is_unseen(self, of: Any) -> bool:
        """Whether nothing is kept of a request, or its handle: nobody asks, or it is none of a
        client's."""
        return not self._is_kept or bool(of.rid.startswith(HEALTH_CHECK_RID_PREFIX))

    # ---- Before it runs ----

    def arrives(self, scheduler: Any, req: Any) -> None:
        """Note that SGLang's request comes into the queue, or is looked up once more."""
        self.step()  # one that has ended may have had the same name
        handle = req.cache_request_handle
        story = self._stories.get(handle)
        if story is None:
            if self._is_unseen(req):
                return
            story = self._open(handle)
            story.line.num_ahead = len(scheduler.waiting_queue)
            story.line.num_running = len(scheduler.running_batch.reqs)
        story.req = req

    def _open(self, handle: Any) -> Story:
        story = self._stories[handle] = Story.begins(self.clock())
        story.queue_wait_s = self._prices.queue_wait_s
        if len(self._stories) > MAX_STORIES:
            self._stories.popitem(last=False)
        return story

    def _waiting(self, request: Any) -> Story | None:
        """Return the story of a request that was not admitted yet."""
        story = self._stories.get(request)
        return None if story is None or story.line.admitted_s is not None else story

    def _loading(self, request: Any) -> Story | None:
        """Return the story that a load of a request belongs to."""
        story = self._stories.get(request)
        return story if story is not None and story.may_load else None

    def looked_up(
        self, request: Any, began_at: float, *, num_before: int, num_new: int, spans: Sequence[Span]
    ) -> None:
        """Note that the tiers hold ``spans`` of pages of its ``num_new`` tokens behind
        ``num_before``."""
        if request not in self._stories and not self._is_unseen(request):
            self._open(request)  # of a decode server, whose queue is another
        if (story := self._waiting(request)) is None:
            return
        page_tokens, last = self._prices.costs.page_tokens, story.line.lookup
        pages = [(TIERS.index(span.tier), span.num_pages) for span in spans]
        story.num_new = num_new
        story.spans = [(tier, num_pages * page_tokens) for tier, num_pages in pages]
        story.line.lookup = Lookup(
            at_s=began_at,
            lookup_s=self.clock() - began_at,
            num_lookups=1 if last is None else last.num_lookups + 1,
            page_tokens=page_tokens,
            num_memory_tokens=num_before,
            **_by_tier("pages", parts_of(pages, len(TIERS))),
        )
        if story.meter is None and spans:
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
        story = self._waiting(request)
        if story is None or story.line.lookup is None:
            return
        costs, num_tiers = self._prices.costs, len(TIERS)
        before, new = story.line.lookup.num_memory_tokens, story.num_new
        first = num_held - num_loaded if is_back else 0
        all_held = parts_of(spans_between(story.spans, 0, num_held), num_tiers)
        loaded = parts_of(spans_between(story.spans, first, first + num_loaded), num_tiers)
        ahead = self._prices.tokens_ahead(num_ahead)
        decision: Decision = "load" if num_loaded >= num_held else "truncated"
        if not num_loaded:
            decision = "declined" if is_declined else "absent"
            self._waits_for(story, None)

        def prefill_s(num_tokens: int, num_before: int) -> float:
            return costs.prefill.prices[0] + costs.prefill.seconds(num_tokens, num_before)

        story.expected_s = {
            tier.value: transfer.seconds(n * costs.bytes_per_token)
            for tier, transfer, n in zip(TIERS, costs.transfers, loaded, strict=True)
            if n
        }
        story.line.plan = Plan(
            at_s=self.clock(),
            decision=decision,
            is_both_ends=is_back,
            load_s=costs.load_seconds(loaded, ahead) if num_loaded else 0.0,
            held_load_s=costs.load_seconds(all_held, ahead) if num_held else 0.0,
            held_prefill_s=costs.prefill.seconds(num_held, before) if num_held else 0.0,
            prefill_all_s=prefill_s(new, before),
            prefill_rest_s=prefill_s(new - num_loaded, before + num_loaded),
            queue_wait_s=story.queue_wait_s,
            num_tokens_ahead=num_ahead,
            **_by_tier("tokens", loaded),
        )

    def put_off(self, request: Any, why: Why) -> None:
        """Note that its load waits for more than its turn."""
        if (story := self._waiting(request)) is not None:
            self._waits_for(story, why)

    def begun(self, request: Any) -> None:
        """Note that its load was queued."""
        if (story := self._waiting(request)) is not None:
            before = story.line.load
            num_loaded = 0 if before is None else before.num_loaded_tokens
            story.line.load = Load(
                at_s=self.clock(), num_tokens=story.num_planned, num_loaded_tokens=num_loaded
            )
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
        story = self._loading(request)
        return None if story is None else story.meter

    def given_up(self, request: Any, cause: Cause, num_tokens: int = 0) -> None:
        """Note that it starts without so many tokens that were to be loaded."""
        story = self._loading(request)
        if story is not None and story.line.given_up is None:
            story.line.given_up = GivenUp(why=cause, at_s=self.clock(), num_tokens=num_tokens)
            self._waits_for(story, None)

    def load_ended(self, request: Any, num_loaded: int) -> None:
        """Note the end of its load, or of a part of it."""
        story = self._loading(request)
        if story is not None and (load := story.line.load) is not None:
            load.load_s = self.clock() - load.at_s
            load.num_loaded_tokens += num_loaded
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
            if story.line.admitted_s is not None:
                story.waits_for = "back"

    # ---- It runs ----

    def admitted(self, request: Any) -> None:
        """Note that it is in the next batch."""
        if (story := self._waiting(request)) is None:
            return
        now = self.clock()
        story.stop_waiting(now)
        story.line.admitted_s = now
        story.prefill_s_before = self._prefill_s
        tell_spans(story, self._unix_minus_clock_s())

    def copied(self, req: Any, num_tokens: int) -> None:
        """Note that a copy of its tokens to the device was queued."""
        story = self._stories.get(req.cache_request_handle)
        if story is not None and num_tokens > 0:
            copy = story.line.copy
            if copy is None:
                copy = story.line.copy = Copy(at_s=self.clock(), num_tokens=0)
            copy.num_tokens += num_tokens
            copy.num_bytes += num_tokens * self._prices.costs.bytes_per_token

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
        self._prefill_s += seconds
        for req, (num_new, num_before) in zip(reqs, spans, strict=False):
            handle = req.cache_request_handle
            story = stories.get(handle) or self._unwritten.get(handle)
            if story is None or story.is_prefilled:
                continue
            prefill, copy = story.line.prefill, story.line.copy
            if prefill is None:
                prefill = Prefill(at_s=now, prefill_s=0.0, num_batches=0, num_tokens=0)
                story.line.prefill = prefill
            prefill.prefill_s += seconds
            if (before_s := story.prefill_s_before) is not None:
                prefill.others_s = max(0.0, self._prefill_s - before_s - prefill.prefill_s)
            prefill.num_batches += 1
            prefill.num_tokens += num_new
            story.is_prefilled = num_before + num_new >= len(req.origin_input_ids)
            if copy is not None and copy.copy_s is None:
                copy.copy_s = max(0.0, now - (not copies_beside) * seconds - copy.at_s)
                tell_spans(story, self._unix_minus_clock_s())

    # ---- It ends ----

    def step(self) -> None:
        """Write the lines of the step before, in which SGLang let go of requests before the batch
        that they ended with was timed."""
        if self._writer is not None:
            for story in self._unwritten.values():
                self._writer.put(story)
        self._unwritten.clear()

    def released(self, req: Any) -> None:
        """Note that it gives its memory back, at its end or to come again."""
        handle = req.cache_request_handle
        if not req.finished() or req in self._ended or handle in self._unwritten:
            return
        story = self._stories.get(handle)
        if story is None:
            if self._is_unseen(req):
                return
            story = Story.begins(self.clock())
        reason = req.finished_reason.to_json().get("type", "")
        self._end(handle, story, req, str(reason))

    def aborted(self, request: Any) -> None:
        """Note that it ended before it ran."""
        story = self._stories.get(request)
        if story is None or request in story.parts:
            return
        if story.req is None:  # of a decode server that never got to match it
            self._drop_story(request, story)
        else:
            self._end(request, story, story.req, "abort")

    def _end(self, handle: Any, story: Story, req: Any, reason: str) -> None:
        self._ended.add(req)
        story.req = req
        now, offset_s = self.clock(), self._unix_minus_clock_s()
        story.stop_waiting(now)
        tell_spans(story, offset_s, is_over=True)
        self._drop_story(handle, story)  # what SGLang does to its load now is none of its line
        if self._writer is None:
            return
        tenant = self._tenant_of(req.extra_key, req.cache_salt)
        line, times = story.line, req.time_stats  # of ``time.perf_counter``; 0.0 is never
        line.rid, line.end = rid_of(req.rid), reason
        line.tenant = tenant.hex() if any(tenant) else ""
        line.arrived_unix_s = times.scheduler_recv_time or line.arrived_unix_s
        line.admitted_s = times.forward_entry_time or line.admitted_s
        line.first_token_s = times.prefill_finished_time or None
        line.total_s = now
        line.num_prompt_tokens = len(req.origin_input_ids)
        line.num_output_tokens = len(req.output_ids)
        line.num_retractions = req.retraction_count
        line.tokens = Sources(num_device=req.cached_tokens_device, num_host=req.cached_tokens_host)
        story.num_storage = req.cached_tokens_storage
        story.unix_minus_clock_s = offset_s
        story.req = None  # its tokens need not wait for the disk
        self._unwritten[handle] = story

    def _drop_story(self, handle: Any, story: Story) -> None:
        self._stories.pop(handle, None)
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
        self.step()
        if self._writer is not None:
            self._writer.close()


def _by_tier(what: str, numbers: Sequence[int]) -> dict[str, int]:
    """Return the fields of a line that count such things of each tier."""
    return {f"num_{tier.value}_{what}": n for tier, n in zip(TIERS, numbers, strict=True)}


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
    for name, level, began, took_s, fields in _spans(story, is_over=is_over):
        if (name, began) in story.told:
            continue
        story.told.add((name, began))
        fields |= {f"failed.{reason}": n for reason, n in fields.pop("failed", {}).items()}
        context.trace_slice(
            TraceSliceContext(
                slice_name=f"tier_{name}",
                start_time_ns=int((began + unix_minus_clock_s) * _NS),
                end_time_ns=int((began + took_s + unix_minus_clock_s) * _NS),
                level=level,
                attrs={PREFIX + key: value for key, value in fields.items() if key != "at_s"},
            )
        )


def _spans(story: Story, *, is_over: bool) -> Iterator[_Span]:
    """Yield name, level, begin, duration and attributes of each span that is complete. Attributes
    are the fields of a part of the line, and some that have a name of their own here."""
    line, load, copy = story.line, story.line.load, story.line.copy
    fields_of: Callable[[Any], dict[str, Any]] = msgspec.to_builtins
    if line.lookup is not None:
        yield "lookup", _INNER, line.lookup.at_s, line.lookup.lookup_s, fields_of(line.lookup)
    for wait in line.waits:
        yield "wait", _OUTER, wait.at_s, wait.wait_s, fields_of(wait)
    # Of what loads while the front of its prompt is computed, one part ends after the other.
    has_ended = is_over or (story.load_s is not None and not story.parts)
    if load is not None and has_ended and ("load", load.at_s) not in story.told:
        more: dict[str, Any] = {"num_loaded_tokens": load.num_loaded_tokens}
        if line.plan is not None:
            more |= {"num_tokens": story.num_planned, "expected_s": line.plan.load_s}
        if line.given_up is not None:
            more["given_up"] = line.given_up.why
        yield "load", _OUTER, load.at_s, story.load_s or 0.0, fields_of(load) | more
        for read in story.tiers():
            failed = {"num_failed_pages": sum(read.failed.values())}
            yield "read", _INNER, read.at_s, read.read_s, fields_of(read) | failed
            if story.meter is not None and read.verify_s:
                checks = story.meter.checks[:]
                began, ended = min(began for began, _ in checks), max(ended for _, ended in checks)
                checked = {"tier": read.tier, "thread_s": read.verify_s}
                yield "verify", _INNER, began, ended - began, checked
    if copy is not None and copy.copy_s is not None:
        yield "copy", _OUTER, copy.at_s, copy.copy_s, fields_of(copy)
