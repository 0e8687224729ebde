"""``Handoffs``: what outlives the KV manager of a scheduler, whose role may be switched.

SGLang makes another manager for the other role. The weights, which may have been replaced since the
start, the adapters and the series of metrics are the process's.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_lora

from sglang_tiered.integration.disaggregation.handed_model import (
    HandedAdapters,
    digests_directory,
    handed_model_of,
)
from sglang_tiered.integration.observe.exporter import MetricsExporter, rank_labels
from sglang_tiered.integration.observe.stats import transfer_stats
from sglang_tiered.metrics import TRANSFER_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.disaggregation.handed_model import HandedModel
    from sglang_tiered.transfer.decode.endpoint import DecodeEndpoint
    from sglang_tiered.transfer.prefill.endpoint import PrefillEndpoint

__all__ = ["Handoffs"]


class Handoffs:
    """Of one scheduler, which has one manager at a time."""

    def __init__(self, config: TieredConfig | None) -> None:
        self.config = config
        self._handed: HandedModel | None = None
        self._exporter: MetricsExporter | None = None
        self._exported: PrefillEndpoint | DecodeEndpoint | None = None

    @cached_property
    def adapters(self) -> HandedAdapters:
        """Return what tells LoRA adapters apart."""
        return HandedAdapters(digests_directory(self.config), get_lora().lora_paths)

    def hand(
        self, kv_format: str, tell: Callable[[bytes | None, str], None], *, with_draft: bool
    ) -> HandedModel:
        """Return what is known of the weights, which ``tell`` hears of from now on."""
        if self._handed is None:
            self._handed = handed_model_of(self.config, kv_format, tell, with_draft=with_draft)
        else:
            self._handed.tell_to(tell)
        return self._handed

    def export(self, endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
        """Publish what an endpoint counted, on its thread; there is one at a time."""
        if self._exported is not endpoint:
            self._exported, read = endpoint, partial(transfer_stats, endpoint)
            if self._exporter is None:
                labels = rank_labels()
                self._exporter = MetricsExporter(read, metrics=TRANSFER_METRICS, labels=labels)
            else:
                self._exporter.read_from(read)
        assert self._exporter is not None
        self._exporter.export()
