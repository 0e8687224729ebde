"""``RequestNotes``: what those who work for a request say of it. By itself it takes no note."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sglang_tiered.request_record import Cause, Why
    from sglang_tiered.storage.base import Meter
    from sglang_tiered.storage.stack.tiers import Span

__all__ = ["NO_NOTES", "RequestNotes"]

_NOTHING = nullcontext()


class RequestNotes:
    """What is said of requests, by handle, in the order of their lives. Scheduler thread, but for
    ``meter_of``; none of the calls waits. This one drops all of it at once."""

    def clock(self) -> float:
        """Return the time, for ``looked_up``."""
        return 0.0

    def arrives(self, scheduler: Any, req: Any) -> None:
        """SGLang's request comes into the queue, or is looked up once more."""

    def looked_up(
        self, request: Any, began_at: float, *, num_before: int, num_new: int, spans: Sequence[Span]
    ) -> None:
        """The tiers hold ``spans`` of pages of its ``num_new`` tokens behind ``num_before``."""

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
        """All ranks together load so many of ``num_held`` tokens, behind ``num_ahead`` of others.
        ``is_declined``: none, since computing is sooner. ``is_back``: the last ones."""

    def put_off(self, request: Any, why: Why) -> None:
        """Its load waits for more than its turn."""

    def begun(self, request: Any) -> None:
        """Its load was queued."""

    def has_part(self, request: Any, part: Any) -> None:
        """A part of its load has a handle of its own."""

    def given_up(self, request: Any, cause: Cause, num_tokens: int = 0) -> None:
        """It starts without so many tokens that were to be loaded."""

    def load_ended(self, request: Any, num_loaded: int) -> None:
        """Its load, or a part of it, has ended."""

    def may_start(self, request: Any, is_ready: bool) -> None:
        """Its turn has come, and it starts or waits on."""

    def admitted(self, request: Any) -> None:
        """It is in the next batch."""

    def copied(self, req: Any, num_tokens: int) -> None:
        """A copy of its tokens to the device was queued."""

    def batch_ran(
        self,
        reqs: Sequence[Any],
        spans: Sequence[tuple[int, int]],
        seconds: float,
        *,
        copies_beside: bool,
    ) -> None:
        """A prefill batch of these requests has ended; it took ``seconds``. ``copies_beside``: what
        it needed was copied to the device while it ran, and not before."""

    def until_timed(self) -> AbstractContextManager[None]:
        """Within it the results of a batch are processed, and the batch is timed: what is said of
        the requests that end there is complete only at its own end."""
        return _NOTHING

    def released(self, req: Any) -> None:
        """It gives its memory back, at its end or to come again."""

    def aborted(self, request: Any) -> None:
        """It ended before it ran."""

    def meter_of(self, request: Any) -> Meter | None:
        """Return what is told of the reads for a request, or for a part of its load. Any thread."""
        return None

    @property
    def num_dropped(self) -> int | None:
        """Return the lines that were lost; None where none is written."""
        return None

    def close(self) -> None:
        """Write what is left. Waits for the disk."""


NO_NOTES = RequestNotes()
"""For servers that nobody asks about their requests: nothing is made for one."""
