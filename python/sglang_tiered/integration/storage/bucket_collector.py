"""``BucketCollector``: bounds age and size of this rank's namespace in the bucket, on a thread."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.object.client import open_client
from sglang_tiered.storage.object.collector import Collector, CollectorSettings

if TYPE_CHECKING:
    from sglang_tiered.storage.object.collector import CollectorReport
    from sglang_tiered.storage.object.settings import ObjectSettings

__all__ = ["BucketCollector"]

JOIN_S = 1.0  # a request under way may take longer; it is safe to leave it behind

logger = logging.getLogger(__name__)


class BucketCollector:
    """Collects every ten minutes, in turn with the other servers of a namespace. Also removes what
    purges left, and what writers that died never announced; so it runs without a cap and a TTL
    too."""

    def __init__(self, settings: ObjectSettings, namespace: bytes) -> None:
        collector = Collector(
            open_client(settings),
            namespace,
            CollectorSettings(capacity_bytes=settings.capacity_bytes, ttl_s=settings.ttl_s),
        )
        self._log = OnceLog(logger)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=collector.run_in_background,
            args=(self._stop,),
            kwargs={"ran": self._ran, "failed": self._failed},
            name="tier-collector",
            daemon=True,
        )
        self._thread.start()

    def _ran(self, report: CollectorReport) -> None:
        self._log.settle("collect")
        if report.num_removed:
            logger.info(
                "object tier: removed %d of %d objects and what belongs to them, %d bytes",
                report.num_removed,
                report.num_objects,
                report.removed_bytes,
            )

    def _failed(self, error: Exception) -> None:
        # Logged once; the tier itself reports that it is sick.
        self._log.report("collect", "object tier: collection failed (%s); it is tried again", error)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)
