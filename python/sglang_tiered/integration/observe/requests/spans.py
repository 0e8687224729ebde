"""Spans of the tiers in a request's own trace, where SGLang traces it (``--enable-trace``).

SGLang's scheduler has a trace context for each request, and a span once it has begun and ended is
one call of it. These are told when the request is admitted, and what ends later when it is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.observability.trace import TraceSliceContext, get_global_tracing_enabled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tiered.integration.observe.requests.story import Story

__all__ = ["PREFIX", "are_on", "tell"]

PREFIX = "sglang_tiered."
"""How the attributes of spans begin."""

_OUTER, _INNER = 1, 2
"""Levels of SGLang's: of what a request waits for, and of its parts (``SGLANG_TRACE_LEVEL``)."""

_NS = 1e9


def are_on() -> bool:
    """Whether this process traces requests."""
    return bool(get_global_tracing_enabled())


def tell(story: Story, unix_minus_clock_s: float, *, is_over: bool = False) -> None:
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


_Span = tuple[str, int, float, float, dict[str, Any]]


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
