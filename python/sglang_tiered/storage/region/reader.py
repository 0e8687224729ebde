"""Reads pages straight into the caller's buffers, verifies each and settles the outcome: what the
reader threads do. What others get is copied out of the owner's memory where that has it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.metrics import Durations
from sglang_tiered.storage.base import Reason, Tier
from sglang_tiered.storage.region.device import aligned_buffer, copy_page
from sglang_tiered.storage.region.format import BLOCK_BYTES, padded
from sglang_tiered.storage.region.pending import (
    is_encoded,
    page_bytes,
    stored_blocks,
    stored_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Meter, Page, Run
    from sglang_tiered.storage.region.disk import Disk
    from sglang_tiered.storage.region.pending import LoadTicket, Wanted


logger = logging.getLogger(__name__)


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


class RegionReader:
    """Reads spans, on any thread of the store. It has no state beyond a block of scratch.
    ``memory`` is looked at for what is not loaded for requests of this server."""

    def __init__(self, disk: Disk) -> None:
        self._disk, self._state = disk, disk.state
        self.memory: OwnersMemory | None = None
        self.verifications = Durations()  # of the pages of one span, for statistics
        # Padding of every page of every thread lands here and is never looked at.
        self._scratch = aligned_buffer(BLOCK_BYTES)
        self._staging = threading.local()  # for encoded pages: a span at most

    def load(self, ticket: LoadTicket, wanted: Sequence[Wanted]) -> None:
        """Read a span of a load and settle it. Raises nothing: a job that is never finished would
        keep the caller's memory forever."""
        state, region = self._state, wanted[0].region
        is_copied, reasons = False, list[Reason]()  # none: the device was not asked
        try:
            if self._disk.is_ours():  # who has it else may have erased the pages
                is_copied = not ticket.for_request and self._copied(ticket.namespace, wanted)
                reasons = [] if is_copied else self._load(ticket, wanted)
        except Exception:
            logger.exception(
                "%s: internal error while loading pages; they are computed again",
                self._disk.directory,
            )
        self._disk.unpin(region)
        with state.lock:
            state.hide_failed(wanted, reasons)
            state.num_pages_from_memory += len(wanted) if is_copied else 0
            unread = Reason.OK if is_copied else Reason.IO_ERROR
            state.finish_span(ticket, wanted, reasons or [unread] * len(wanted))
        if Reason.CORRUPT in reasons:
            self._disk.log.report(
                region.name,
                "%s holds damaged pages; they are forgotten and computed again",
                self._disk.directory / region.name,
            )

    def _load(self, ticket: LoadTicket, wanted: Sequence[Wanted]) -> list[Reason]:
        """Read a span, and decode what was read and verified elsewhere into its pages."""
        asked = () if ticket.is_as_stored else wanted
        stored = self._staged(asked) or wanted
        reasons = self.read(ticket.namespace, stored, ticket.job.run.meter, asked)
        for position, (item, read) in enumerate(zip(wanted, stored, strict=True)):
            if read.page is not item.page and reasons[position] is Reason.OK:
                assert self._state.encoding is not None
                (data,) = stored_bytes(read.page, item.length)
                reasons[position] = self._state.encoding.decode(data, item.page)
        return reasons

    def may_copy(self, run: Run) -> bool:
        """Whether the owner's memory seems to have all pages of a run. Memory only."""
        return self.memory is not None and self.memory.knows(run.keys)

    def _copied(self, namespace: bytes, wanted: Sequence[Wanted]) -> bool:
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
        try:
            found = memory.find([item.key for item in wanted]) or ()
            for item, page in zip(wanted, found, strict=False):
                if page_bytes(page) != item.length:
                    return False  # it is stored encoded
                copy_page(page, item.page[0])
                if not _verifies(namespace, item):
                    memory.forget([item.key])
                    return False
        except Exception:
            logger.exception(
                "%s: internal error while copying pages; they are read", self._disk.directory
            )
            return False
        return len(found) == len(wanted)

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

    def read(
        self,
        namespace: bytes,
        span: Sequence[Wanted],
        meter: Meter | None = None,
        asked: Sequence[Wanted] = (),
    ) -> list[Reason]:
        """Fill the pages of one span: each is OK, CORRUPT or an IO_ERROR. ``meter`` is told what
        checking takes. ``asked`` is what a load wants, where encoded pages are to be decoded from
        the span."""
        reasons, error = self._read(namespace, span, meter, asked)
        self._disk.read_ended(error)
        if error is None:
            self._disk.log.settle("read")
        else:
            self._disk.log.report(
                "read",
                "%s cannot be read (%s); pages that fail are hidden and computed again",
                self._disk.directory,
                error,
            )
        return reasons

    def _read(
        self,
        namespace: bytes,
        span: Sequence[Wanted],
        meter: Meter | None,
        asked: Sequence[Wanted],
    ) -> tuple[list[Reason], OSError | None]:
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
        verified, left = [], filled
        for item in span:
            left -= padded(item.length)
            verified.append(left >= 0 and _verifies(namespace, item))
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
                return reasons + [Reason.IO_ERROR] * rest, error
            is_whole = filled_again and _verifies(namespace, item)
            reasons.append(Reason.OK if is_whole else Reason.CORRUPT)
        recovered = all(reason is Reason.OK for reason in reasons)
        return reasons, None if recovered else failure

    def _read_pages(self, span: Sequence[Wanted]) -> int:
        segments: list[memoryview] = []
        for item in span:
            segments.extend(stored_blocks(item.page, self._scratch))
        first = span[0]
        with self._disk.watch():
            return self._disk.device.readv(first.region.fd, segments, first.offset)


def _verifies(namespace: bytes, item: Wanted) -> bool:
    page = stored_bytes(item.page, item.length)
    return page_checksum(namespace, item.key, page) == item.checksum
