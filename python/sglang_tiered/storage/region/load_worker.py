"""What the reader threads do: fill the caller's pages and settle the outcome."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sglang_tiered.storage.backoff import OnceLog
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.pending import LoadSpan
    from sglang_tiered.storage.region.reader import RegionReader
    from sglang_tiered.storage.region.reclaim import Reclaimer
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["LoadWorker"]

logger = logging.getLogger(__name__)


class LoadWorker:
    """Reads spans; every reader thread runs ``run`` of the same worker. No thread ends by an
    exception: a job that is never finished would keep the caller's memory forever."""

    def __init__(
        self,
        directory: Path,
        state: StoreState,
        health: HealthMonitor,
        log: OnceLog,
        reader: RegionReader,
        reclaimer: Reclaimer,
        check_lock: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._state = state
        self._health = health
        self._log = log
        self._reader = reader
        self._reclaimer = reclaimer
        self._check_lock = check_lock

    def run(self) -> None:
        """Load until the store is closed."""
        state = self._state
        while True:
            with state.lock:
                while not state.loads and not state.let_go and not state.closed:
                    state.load_ready.wait()
                region = state.let_go.popleft() if state.let_go else None
                unused = region is not None and state.regions.unpin(region)
                if region is None:
                    if not state.loads:
                        return
                    span = state.take_load()
            if region is None:
                self._load(span)
            elif unused:
                self._reclaimer.dispose(region)

    def _skip(self, span: LoadSpan, reason: Reason) -> None:
        """Finish a span that was not tried; its pages stay indexed."""
        self._unpin(span)
        with self._state.lock:
            self._state.finish_span(span, [reason] * len(span.wanted))

    def _load(self, span: LoadSpan) -> None:
        if not self._check_lock():  # who has it now may have erased the pages
            self._skip(span, Reason.IO_ERROR)
            return
        try:
            ticket = span.ticket
            reasons, error = self._reader.read(ticket.namespace, span.wanted, ticket.job.run.meter)
        except Exception:
            logger.exception(
                "%s: internal error while loading pages; they are computed again", self._directory
            )
            self._skip(span, Reason.IO_ERROR)
            return
        if error is None:
            self._health.read_succeeded()
            self._log.settle("read")
        else:
            self._health.read_failed(error)
            self._log.report(
                "read",
                "%s cannot be read (%s); pages that fail are hidden and computed again",
                self._directory,
                error,
            )
        self._unpin(span)
        self._settle(span, reasons)

    def _settle(self, span: LoadSpan, reasons: Sequence[Reason]) -> None:
        state = self._state
        region = span.wanted[0].region
        report = False
        with state.lock:
            for item, reason in zip(span.wanted, reasons, strict=True):
                if reason in (Reason.CORRUPT, Reason.IO_ERROR) and not region.retired:
                    state.hide(item, reason)
                if reason is Reason.IO_ERROR:
                    break  # the pages behind it were not tried again and stay
            if Reason.CORRUPT in reasons:
                report, region.corruption_reported = not region.corruption_reported, True
            state.finish_span(span, reasons)
        if report:
            logger.warning(
                "%s holds damaged pages; they are forgotten and computed again",
                self._directory / region.name,
            )

    def _unpin(self, span: LoadSpan) -> None:
        region = span.wanted[0].region
        with self._state.lock:
            unused = self._state.regions.unpin(region)
        if unused:
            self._reclaimer.dispose(region)
