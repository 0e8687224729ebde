"""What the writer thread and the reader threads do. Neither ever ends by an exception: a job that
nobody finishes would keep the caller's memory forever."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.region.jobs import StoreTicket
from sglang_tiered.storage.region.writer import NO_SPACE_ERRNOS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.storage.region.health import HealthMonitor, OnceLog
    from sglang_tiered.storage.region.jobs import LoadSpan
    from sglang_tiered.storage.region.reader import RegionReader
    from sglang_tiered.storage.region.reclaim import Reclaimer
    from sglang_tiered.storage.region.state import StoreState
    from sglang_tiered.storage.region.writer import RegionWriter

__all__ = ["LoadWorker", "StoreWorker"]

logger = logging.getLogger(__name__)


class StoreWorker:
    """Takes stores in order of submission; its ``run`` is the writer thread."""

    def __init__(
        self,
        directory: Path,
        state: StoreState,
        health: HealthMonitor,
        log: OnceLog,
        writer: RegionWriter,
        reclaimer: Reclaimer,
    ) -> None:
        self._directory = directory
        self._state = state
        self._health = health
        self._log = log
        self._writer = writer
        self._reclaimer = reclaimer

    def run(self) -> None:
        """Until the store is closed and the queue empty; then seal what is open."""
        state = self._state
        while True:
            with state.lock:
                while not state.stores and not state.closed:
                    state.store_ready.wait()
                if not state.stores:
                    break
                order = state.stores.popleft()
            if isinstance(order, StoreTicket):
                self._store(order)
            else:
                self._clear()
                order.done.set()
        try:
            self._writer.finish()
        except OSError as error:
            logger.warning(
                "%s: the last region could not be sealed (%s), so the next start walks it",
                self._directory,
                error,
            )

    def _store(self, ticket: StoreTicket) -> None:
        state = self._state
        pages = ticket.pages()
        done = 0
        reason = Reason.CANCELLED
        try:
            while done < len(pages) and not ticket.job.cancelled and not state.closed:
                if not self._health.accepts_stores():
                    reason = Reason.REJECTED
                    break
                placed = self._writer.append(ticket.namespace, pages[done:])
                with state.lock:
                    state.publish(ticket, done, placed)
                done += len(placed)
                self._health.store_succeeded()
                self._log.settle("store")
                self._log.settle("space")
        except OSError as error:
            reason = self._failed(error)
        except Exception:
            logger.exception("%s: storing failed by our own fault", self._directory)
            reason = Reason.IO_ERROR
        pages.clear()
        with state.lock:
            state.finish_store(ticket, done, reason)

    def _failed(self, error: OSError) -> Reason:
        self._health.store_failed()
        if error.errno in NO_SPACE_ERRNOS:
            self._log.report(
                "space",
                "%s has no room for another page (%s); stores are dropped until it has",
                self._directory,
                error.strerror,
            )
            return Reason.NO_SPACE
        self._log.report(
            "store",
            "%s cannot be written (%s); stores are dropped and retried with growing pauses",
            self._directory,
            error,
        )
        return Reason.IO_ERROR

    def _clear(self) -> None:
        self._writer.abandon()
        with self._state.lock:
            regions = list(self._state.regions)
        for region in regions:
            try:
                self._reclaimer.remove(region)
            except OSError as error:
                self._log.report(
                    "store",
                    "%s could not be emptied (%s); its pages are forgotten, its files stay for now",
                    self._directory,
                    error,
                )


class LoadWorker:
    """Reads spans; every reader thread runs ``run`` of the same worker."""

    def __init__(
        self,
        directory: Path,
        state: StoreState,
        health: HealthMonitor,
        log: OnceLog,
        reader: RegionReader,
        reclaimer: Reclaimer,
    ) -> None:
        self._directory = directory
        self._state = state
        self._health = health
        self._log = log
        self._reader = reader
        self._reclaimer = reclaimer

    def run(self) -> None:
        """Until the store is closed."""
        state = self._state
        while True:
            with state.lock:
                while not state.loads and not state.closed:
                    state.load_ready.wait()
                if not state.loads:
                    return
                span = state.loads.popleft()
            self._load(span)

    def skip(self, span: LoadSpan, reason: Reason) -> None:
        """Finish a span that was not tried; its pages stay indexed."""
        self._unpin(span)
        with self._state.lock:
            self._state.finish_span(span, [reason] * len(span.wanted))

    def _load(self, span: LoadSpan) -> None:
        if span.ticket.job.cancelled:
            self.skip(span, Reason.CANCELLED)
            return
        try:
            reasons, error = self._reader.read(span.ticket.namespace, span.wanted)
        except Exception:
            logger.exception("%s: loading failed by our own fault", self._directory)
            self.skip(span, Reason.IO_ERROR)
            return
        if error is None:
            self._health.read_succeeded()
            self._log.settle("read")
        else:
            self._health.read_failed()
            self._log.report(
                "read",
                "%s cannot be read (%s); pages that fail are forgotten and computed again",
                self._directory,
                error,
            )
        self._unpin(span)
        self._settle(span, reasons)

    def _settle(self, span: LoadSpan, reasons: Sequence[Reason]) -> None:
        state = self._state
        region = span.wanted[0].entry.region
        report = False
        with state.lock:
            for item, reason in zip(span.wanted, reasons, strict=True):
                if reason in (Reason.CORRUPT, Reason.IO_ERROR):
                    state.index.drop(item.key, item.entry)
                if reason is Reason.IO_ERROR:
                    # An unreadable page goes, or a bad sector would fail the same load for ever;
                    # the pages behind it were not tried again and stay.
                    break
            if Reason.CORRUPT in reasons:
                report, region.corruption_reported = not region.corruption_reported, True
            state.finish_span(span, reasons)
        if report:
            logger.warning(
                "%s holds damaged pages; they are forgotten and computed again",
                self._directory / region.name,
            )

    def _unpin(self, span: LoadSpan) -> None:
        region = span.wanted[0].entry.region
        with self._state.lock:
            unused = self._state.regions.unpin(region)
        if unused:
            self._reclaimer.dispose(region)
