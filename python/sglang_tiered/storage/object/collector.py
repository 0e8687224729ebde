"""The collector of the object tier: time to live, the byte cap of a namespace, the erased, orphans.

Any number of servers run one each, beside any number that write and read. It never deletes what a
writer has just uploaded and not announced yet; it can be killed at any moment and started again;
its memory is bounded. ``collection`` has a single run; this has its clock and its turns.

What it cannot do: ``obstore`` does not list multipart uploads that were never finished, so a bucket
needs its own lifecycle rule for them (AbortIncompleteMultipartUpload after a day). Their bytes are
never visible.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from sglang_tiered.storage.object.collection import Collection, store_clock
from sglang_tiered.storage.object.names import Layout
from sglang_tiered.storage.object.removals import CollectorReport, CollectorSettings, Removal

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from sglang_tiered.storage.object.client import ObjectClient

__all__ = ["Collector", "CollectorReport", "CollectorSettings", "Removal"]

DEFAULT_BUDGET = 10_000
_FIRST_RUN_S = 60.0


class Collector:
    """Collects one namespace of a store; its paths are relative to the store's prefix. Every method
    blocks on the network: not for a scheduler thread."""

    def __init__(
        self,
        client: ObjectClient,
        namespace: bytes,
        settings: CollectorSettings,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Use a client of its own, so that its failures are not those of loads. ``clock``: the
        store's time in seconds since 1970; asked of the store itself when not given."""
        self._client = client
        self._layout = Layout(namespace)
        self._settings = settings
        self._clock = clock or (lambda: store_clock(client, self._layout))

    @property
    def _last_run_folder(self) -> str:
        return f"{self._layout.folder}/collected"

    def run_once(
        self,
        budget: int = DEFAULT_BUDGET,
        *,
        delete: bool = True,
        stop: threading.Event | None = None,
    ) -> CollectorReport:
        """Remove at most ``budget`` things, or only plan to. Ends early once ``stop`` is set.
        Raises ``RequestError``; whatever was done stands, and the next run goes on from there."""
        collection = Collection(
            self._client,
            self._layout.namespace,
            self._settings,
            budget=budget,
            delete=delete,
            now=self._clock,
            stop=stop,
        )
        report = collection.run()
        if delete and report.is_complete:
            self._client.put(f"{self._last_run_folder}/last", b"done")
        return report

    def is_due(self) -> bool:
        """Return whether the last interval, by the store's clock, saw no finished run."""
        listed = (entry for chunk in self._client.listing(self._last_run_folder) for entry in chunk)
        last = max((entry.modified for entry in listed), default=None)
        return last is None or self._clock() - last >= self._settings.interval_s

    def run_in_background(
        self,
        stop: threading.Event,
        *,
        ran: Callable[[CollectorReport], None],
        failed: Callable[[Exception], None],
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        """Collect until ``stop`` is set, on a thread of the owner; returns soon afterwards, at the
        latest when the request under way ends. ``ran`` and ``failed`` are called on this thread.
        Servers take turns: one that finds a recent run of another waits for the next turn."""
        source = random.Random()
        wait_s = min(_FIRST_RUN_S, self._settings.interval_s)
        while not stop.wait(wait_s * source.uniform(0.5, 1.5)):
            wait_s = self._settings.interval_s
            try:
                if self.is_due():
                    ran(self.run_once(budget, stop=stop))
            except Exception as error:  # of the network, or a bug: a server lives without it
                failed(error)
