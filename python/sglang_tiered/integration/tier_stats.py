"""``TierStats``: everything the metric table reads, as one snapshot of one scheduler process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.base import EngineStats

if TYPE_CHECKING:
    from sglang_tiered.integration.host_ledger import HostLedger
    from sglang_tiered.integration.load_planner import LoadDecision, LoadPlanner
    from sglang_tiered.integration.store_gate import StoreGate
    from sglang_tiered.policy.admission import Outcome
    from sglang_tiered.policy.page_fates import Fate

__all__ = ["TierStats", "tier_stats"]


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats(EngineStats):
    """What the engine counts, what admission made of the pages that were offered, what the
    planner decided and learnt, and what became of host pages."""

    admission: dict[Outcome, int]
    write_budget_bytes: float | None
    load_decisions: dict[LoadDecision, int]  # tokens
    prefill_tokens_per_s: float | None  # of a cold prompt of 2,048 tokens; None before a batch
    load_bytes_per_s: float | None  # of a load of 16 MiB; None before one
    num_loads: int
    load_s: float
    host_pages_left: dict[Fate, int]
    num_dirty_host_pages: int
    spill_waiting_tokens: int
    spill_flight_tokens: int
    num_backups_skipped: int
    num_backups_recovered: int


def tier_stats(
    engine: EngineStats, gate: StoreGate, ledger: HostLedger, planner: LoadPlanner[Any] | None
) -> TierStats:
    """A snapshot. Memory only, any thread."""
    counted = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    prefill = None if planner is None else planner.costs.prefill
    transfer = None if planner is None else planner.costs.transfer
    return TierStats(
        **counted,
        **ledger.stats(),
        admission=gate.outcomes,
        write_budget_bytes=gate.budget_bytes,
        load_decisions={} if planner is None else dict(planner.tokens),
        num_loads=0 if planner is None else planner.num_loads,
        load_s=0.0 if planner is None else planner.load_s,
        prefill_tokens_per_s=prefill.tokens_per_s if prefill and prefill.num_observed else None,
        load_bytes_per_s=transfer.bytes_per_s if transfer and transfer.num_observed else None,
    )
