"""Reads pages straight into the caller's buffers and verifies each. Any reader thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.metrics.durations import Durations
from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import BLOCK_BYTES, padded, page_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Meter, Page
    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.regions import Region

__all__ = ["RegionReader", "SpanResult", "Wanted", "plan_spans"]

_SPAN_BYTES = 1 << 20  # one read: large enough for bandwidth, small enough to spread a run


class Wanted(NamedTuple):
    """One page to load: its place in the run, where it lies, what it must hash to, and where it
    goes."""

    position: int
    key: bytes
    region: Region
    offset: int  # within the region
    length: int  # bytes, without padding
    checksum: int
    page: Page


class SpanResult(NamedTuple):
    reasons: list[Reason]  # OK, CORRUPT or IO_ERROR, one per page of the span
    error: OSError | None


def plan_spans(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """Group pages that follow each other on disk into single reads. Pure."""
    spans: list[list[Wanted]] = []
    region: Region | None = None
    end = nbytes = 0
    for item in wanted:
        size = padded(item.length)
        if item.region is region and item.offset == end and nbytes + size <= _SPAN_BYTES:
            spans[-1].append(item)
            nbytes += size
        else:
            spans.append([item])
            region, nbytes = item.region, size
        end = item.offset + size
    return spans


class RegionReader:
    """Reads spans. Stateless beyond a block of scratch; shared by all reader threads."""

    def __init__(self, device: Device, health: HealthMonitor) -> None:
        self._device = device
        self._health = health
        self.verifications = Durations()  # of the pages of one span, for statistics
        # Padding of every page of every thread lands here and is never looked at.
        self._scratch = aligned_buffer(BLOCK_BYTES)

    def read(
        self, namespace: bytes, span: Sequence[Wanted], meter: Meter | None = None
    ) -> SpanResult:
        """Fill the pages of one span. A page that does not verify, or whose read failed or came
        short, is read once more by itself before it fails. ``meter`` is told what checking takes.
        Never raises."""
        failure: OSError | None = None
        try:
            filled = self._read_pages(span)
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
            segments.extend(segment for segment in item.page if segment.nbytes)
            padding = padded(item.length) - item.length
            if padding:
                segments.append(self._scratch[:padding])
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
    return page_checksum(namespace, item.key, item.page) == item.checksum
