"""Loads on their way: who may touch a run's pages, and who finishes its job."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.bucket.names import page_checksum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tiered.storage.base import Job, Page, Reason
    from sglang_tiered.storage.bucket.names import Layout, PageName

__all__ = ["LoadTicket", "PageLoad"]


class LoadTicket:
    """A load, page by page. Its guard decides who may touch the run's pages: threads that copy
    report it before and after, and once the ticket is closed none begins. Exactly one thread is
    told True, and it finishes the job."""

    def __init__(self, job: Job, layout: Layout, num_pages: int, deadline: float | None) -> None:
        self.job = job
        self.layout = layout
        self.deadline = deadline  # of the state's clock
        self._guard = threading.Condition()
        self._num_left = num_pages
        self._num_touching = 0
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    @contextlib.contextmanager
    def touching(self) -> Iterator[bool]:
        """Guard every touch of the pages or the reasons; false when it must not be."""
        with self._guard:
            allowed = self._is_open
            self._num_touching += 1
        try:
            yield allowed
        finally:
            with self._guard:
                self._num_touching -= 1
                self._guard.notify_all()

    def settle_page(self) -> bool:
        """Note that a page is done; true for the last one of an open ticket, which closes it."""
        with self._guard:
            self._num_left -= 1
            if not self._is_open or self._num_left:
                return False
            self._is_open = False
            return True

    def expire(self) -> bool:
        """Close the ticket before its pages are done; false when it was closed. True once no thread
        touches the pages, which takes no longer than the copy of one."""
        with self._guard:
            if not self._is_open:
                return False
            self._is_open = False
            self._guard.wait_for(lambda: not self._num_touching)
            return True


class PageLoad(NamedTuple):
    """One page to read: where it goes, and what it is called."""

    ticket: LoadTicket
    position: int
    name: PageName
    stored: int

    @property
    def page(self) -> Page:
        return self.ticket.job.run.pages[self.position]

    def matches(self, parts: tuple[memoryview, ...]) -> bool:
        return page_checksum(self.name.stem(self.ticket.layout), parts) == self.name.checksum

    def end(self, reason: Reason) -> None:
        with self.ticket.touching() as allowed:
            if allowed:
                self.ticket.job.reasons[self.position] = reason
