"""What a metric is, and how it is called."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["PREFIX", "Kind", "Metric"]

PREFIX = "sglang_tiered:"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported series. ``field`` is the attribute it is read from: of ``TierStats``, or of
    ``TransferStats`` in the second table. A part of it that is None gives no sample."""

    name: str
    kind: Kind
    field: str
    labels: tuple[str, ...]
    help: str

    @property
    def full_name(self) -> str:
        return PREFIX + self.name
