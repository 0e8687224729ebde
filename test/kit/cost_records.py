"""Records of ``GET /tier/costs``, as a server writes them."""

from __future__ import annotations

from typing import Any

from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.server_costs import (
    TIERS,
    DecodeLoad,
    PrefillPrices,
    RankCosts,
    Room,
    TierPrices,
    Waiting,
)


def record_of(model: CostModel, **more: Any) -> RankCosts:
    """A record with the prices of a model and no load; ``more`` are other fields."""
    values: dict[str, Any] = {
        "at": 1.5,
        "boot": "00" * 16,
        "rank": 0,
        "role": "aggregated",
        "bootstrap_port": None,
        "namespace": "11" * 32,
        "server": "",
        "page_tokens": model.page_tokens,
        "kv_bytes_per_token": model.bytes_per_token,
        "prefill": PrefillPrices(model.prefill.prices, model.prefill.num_observed),  # type: ignore[arg-type]
        "tiers": {
            name: TierPrices(cost.prices, cost.num_observed, healthy=True)  # type: ignore[arg-type]
            for name, cost in zip(TIERS, model.transfers, strict=True)
        },
        "always_loads": False,
        "keyed": False,
        "queue_wait_s": 0.0,
        "running_prefill_s": 0.0,
        "busy": 0.0,
        "ahead_tokens": (0, 0, 0),
        "waiting": Waiting(0, 0),
        "decode": DecodeLoad(0, 8, (0, 0, 0, 0, 0, 0)),
        "device": Room(0, 4096),
        "host": Room(0, 8192),
    }
    return RankCosts(**{**values, **more})
