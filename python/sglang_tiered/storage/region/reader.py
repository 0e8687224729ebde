"""Reads pages straight into the caller's buffers, verifies each and settles the outcome: what the
reader threads do. What others get is copied out of the owner's memory where that has it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.metrics import Durations
from sglang_tiered.storage.base import Reason, Tier
from sglang_tiered.storage.region.device import aligned_buffer, copy_page
from sglang_tiered.storage.region.format import BLOCK_BYTES, padded
from sglang_tiered.storage.region.part import StorePart
from sglang_tiered.storage.region.pending import (
    is_encoded,
    page_bytes,
    stored_blocks,
    stored_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Meter, Page, Run
    from sglang_tiered.storage.region.part import Common
    from sglang_tiered.storage.region.pending import LoadSpan, Wanted


logger = logging.getLogger(__name__)


class SpanResult(NamedTuple):
    reasons: list[Reason]  # OK, CORRUPT or IO_ERROR, one per page of the span
    error: OSError | None


class OwnersMemory(Protocol):
    """Where the owner of a store has pages in memory, as far as it knows. Any thread, memory
    only."""

    def knows(self, keys: Sequence[bytes]) -> bool:
        """Return whether ``find`` would return pages."""
        ...

    def find(self, keys: Sequence[bytes]) -> Sequence[Page] | None:
        """Return where these pages were last seen, or None unless all were seen. What lies there
        now may be another page, or half of one."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Take note that these pages are not where they were."""
        ...


class RegionReader(StorePart):
    """Reads spans, on any thread of the store. It has no state beyond a block of scratch.
    ``memory`` is looked at for what is not loaded for requests of this server."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self.memory: OwnersMemory | None = None
        self.verifications = Durations()  # of the pages of one span, for statistics
        # Padding of every page of every thread lands here and is never looked at.
        self._scratch = aligned_buffer(BLOCK_BYTES)
        self._staging = threading.local()  # for encoded pages: a span at most

    def load(self, span: LoadSpan) -> None:
        """Read a span of a load and settle it. Raises nothing: a job that is never finished would
        keep the caller's memory forever."""
        if not self.is_ours():  # who has it now may have erased the pages
            self._finish(span, Reason.IO_ERROR)
            return
        try:
            ticket = span.ticket
            is_copied = not ticket.for_request and self._copied(ticket.namespace, span.wanted)
            if not is_copied:
                asked = () if ticket.is_as_stored else span.wanted
                stored, meter = self._staged(asked) or span.wanted, ticket.job.run.meter
                reasons, error = self.read(ticket.namespace, stored, meter, asked)
                self._decode(span.wanted, stored, reasons)
        except Exception:
            logger.exception(
                "%s: internal error while loading pages; they are computed again", self._directory
            )
            self._finish(span, Reason.IO_ERROR)
            return
        if is_copied:
            self._finish(span, Reason.OK, from_memory=True)
            return
        if error is None:
            self._log.settle("read")
        else:
            self._log.report(
                "read",
                "%s cannot be read (%s); pages that fail are hidden and computed again",
                self._directory,
                error,
            )
        self.unpin(span.wanted[0].region)
        self._settle(span, reasons)

    def may_copy(self, run: Run) -> bool:
        """Whether the owner's memory seems to have all pages of a run. Memory only."""
        return self.memory is not None and self.memory.knows(run.keys)

    def _copied(self, namespace: bytes, wanted: Sequence[Wanted]) -> bool:
        """``_copy``; what fails in it is not the device's, and is read there."""
        try:
            return self._copy(namespace, wanted)
        except Exception:
            logger.exception(
                "%s: internal error while copying pages; they are read", self._directory
            )
            return False

    def _copy(self, namespace: bytes, wanted: Sequence[Wanted]) -> bool:
        """Fill the pages of a span out of the owner's memory. Returns whether that has all of them;
        if not they are to be read, whatever was filled.

        The owner gives that memory to other pages as it likes, and writes it while it is copied.
        So the copy is verified, where nobody else writes, as what the device brings is: by the
        checksum of namespace, key and bytes with which the page was stored. What is half written,
        of other weights, another page, or computed once more with other rounding is read instead.
        """
        memory = self.memory
        if memory is None or any(len(item.page) > 1 for item in wanted):
            return False
        found = memory.find([item.key for item in wanted])
        if found is None:
            return False
        for item, page in zip(wanted, found, strict=True):
            if page_bytes(page) != item.length:
                return False  # it is stored encoded
            copy_page(page, item.page[0])
            if not _verifies(namespace, item):
                memory.forget([item.key])
                return False
        return True

    def _staged(self, wanted: Sequence[Wanted]) -> Sequence[Wanted]:
        """Return what to read where: an encoded page into memory of this thread."""
        lengths = [padded(item.length) if is_encoded(item) else 0 for item in wanted]
        if not any(lengths):
            return wanted
        memory = getattr(self._staging, "memory", memoryview(b""))
        if memory.nbytes < sum(lengths):
            memory = self._staging.memory = aligned_buffer(sum(lengths))
        stored = []
        start = 0
        for item, length in zip(wanted, lengths, strict=True):
            page = (memory[start : start + length],) if length else item.page
            stored.append(item._replace(page=page))
            start += length
        return stored

    def _decode(
        self, wanted: Sequence[Wanted], stored: Sequence[Wanted], reasons: list[Reason]
    ) -> None:
        """Fill the pages of what was read and verified elsewhere."""
        encoding = self._state.encoding
        for position, (item, read) in enumerate(zip(wanted, stored, strict=True)):
            if read.page is not item.page and reasons[position] is Reason.OK:
                assert encoding is not None
                (data,) = stored_bytes(read.page, item.length)
                reasons[position] = encoding.decode(data, item.page)

    def _finish(self, span: LoadSpan, reason: Reason, *, from_memory: bool = False) -> None:
        """Finish a span that the device was not asked for; its pages stay indexed."""
        self.unpin(span.wanted[0].region)
        with self._state.lock:
            self._state.num_pages_from_memory += len(span.wanted) if from_memory else 0
            self._state.finish_span(span, [reason] * len(span.wanted))

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

    def read(
        self,
        namespace: bytes,
        span: Sequence[Wanted],
        meter: Meter | None = None,
        asked: Sequence[Wanted] = (),
    ) -> SpanResult:
        """Fill the pages of one span, and tell the store's health how that went. ``meter`` is told
        what checking takes. ``asked`` is what a load wants, where encoded pages are to be decoded
        from the span."""
        result = self._read(namespace, span, meter, asked)
        if result.error is None:
            self._health.read_succeeded()
        else:
            self._health.read_failed(result.error)
        return result

    def _read(
        self,
        namespace: bytes,
        span: Sequence[Wanted],
        meter: Meter | None,
        asked: Sequence[Wanted],
    ) -> SpanResult:
        """A page that does not verify, or whose read failed or came short, is read once more by
        itself before it fails."""
        failure: OSError | None = None
        encoding, began = self._state.encoding, time.monotonic()
        try:
            filled = self._read_pages(span)
            if encoding is not None and asked:
                asked_bytes = sum(page_bytes(item.page) for item in asked)
                encoding.note_read(Tier.NVME, time.monotonic() - began, filled, asked_bytes)
        except OSError as error:
            filled = 0
            failure = error
        began = time.monotonic()
        verified = _intact_pages(namespace, span, filled)
        if filled:
            took_s = time.monotonic() - began
            self.verifications.record(took_s)
            if meter is not None:
                meter.verified(took_s)
        reasons: list[Reason] = []
        for item, is_verified in zip(span, verified, strict=True):
            if is_verified:
                reasons.append(Reason.OK)
                continue
            try:
                filled_again = self._read_pages([item]) == padded(item.length)
            except OSError as error:
                # The device is failing: retrying every page of the span would take it forever.
                rest = len(span) - len(reasons)
                return SpanResult(reasons + [Reason.IO_ERROR] * rest, error)
            is_whole = filled_again and _verifies(namespace, item)
            reasons.append(Reason.OK if is_whole else Reason.CORRUPT)
        recovered = all(reason is Reason.OK for reason in reasons)
        return SpanResult(reasons, None if recovered else failure)

    def _read_pages(self, span: Sequence[Wanted]) -> int:
        segments: list[memoryview] = []
        for item in span:
            segments.extend(stored_blocks(item.page, self._scratch))
        first = span[0]
        with self._health.watch():
            return self._device.readv(first.region.fd, segments, first.offset)


def _intact_pages(namespace: bytes, span: Sequence[Wanted], filled: int) -> list[bool]:
    """Return of each page whether the first ``filled`` bytes brought it, undamaged."""
    verified = []
    for item in span:
        filled -= padded(item.length)
        verified.append(filled >= 0 and _verifies(namespace, item))
    return verified


def _verifies(namespace: bytes, item: Wanted) -> bool:
    page = stored_bytes(item.page, item.length)
    return page_checksum(namespace, item.key, page) == item.checksum
