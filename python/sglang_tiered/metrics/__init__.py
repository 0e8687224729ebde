"""Every metric this package exports, in one table, beside SGLang's own on ``/metrics``.

Names carry the prefix ``sglang_tiered:``; counters end in ``_total`` as prometheus-client adds it.
``docs/metrics.md`` says the same (``test/meta/test_documentation.py`` compares them).
"""

from __future__ import annotations

from sglang_tiered.metrics.metric import PREFIX, Kind, Metric
from sglang_tiered.metrics.nvme import NVME_METRICS
from sglang_tiered.metrics.object import OBJECT_METRICS
from sglang_tiered.metrics.peer import PEER_METRICS
from sglang_tiered.metrics.transfer import TRANSFER_METRICS

__all__ = ["METRICS", "PREFIX", "TRANSFER_METRICS", "Kind", "Metric"]

METRICS = (*NVME_METRICS, *OBJECT_METRICS, *PEER_METRICS)
