"""What a modelled server says of itself: the record that a real one publishes, for
``GET /tier/costs``, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sglang_tiered.policy.server_costs import (
    TIERS,
    DecodeLoad,
    PrefillPrices,
    RankCosts,
    Room,
    TierPrices,
    Waiting,
)

if TYPE_CHECKING:
    from sglang_tiered.policy.cost_model import CostModel
    from sglang_tiered_lab.trace.cluster.server import Server


MAX_REQUESTS = 1 << 12
_ROLES = {"both": "aggregated", "prefill": "prefill", "decode": "decode"}


class Reporter:
    """Takes records of one server, with the prices of ``costs`` in the place of its own."""

    def __init__(self, server: Server, costs: CostModel) -> None:
        self._server, self._costs = server, costs
        self._prefill = PrefillPrices(
            cast("tuple[float, float, float, float]", costs.prefill.prices), 1
        )
        self._tiers = {
            name: TierPrices(cast("tuple[float, float]", cost.prices), 1, healthy=True)
            for name, cost in zip(TIERS, costs.transfers, strict=True)
        }

    def take(self, now_s: float) -> RankCosts:
        server = self._server
        server.advance(now_s)
        return RankCosts(
            at=now_s,
            boot="",
            rank=0,
            role=_ROLES[server.role],
            bootstrap_port=None,
            namespace="",
            server="",
            page_tokens=self._costs.page_tokens,
            kv_bytes_per_token=self._costs.bytes_per_token,
            prefill=self._prefill,
            tiers=self._tiers,
            always_loads=False,
            keyed=False,
            queue_wait_s=server.queue.seconds(is_busy=False),
            running_prefill_s=server.running_prefill_s,
            service_s=server.queue.service_s,
            num_others=server.num_others,
            busy=server.busy_share(),
            ahead_tokens=server.ahead(),
            waiting=Waiting(len(server.waiting), server.waiting_tokens),
            decode=DecodeLoad(
                len(server.decoding), MAX_REQUESTS, server.moments, server.used_tokens
            ),
            device=Room(server.held_tokens, server.kv_tokens),
            host=Room(server.tiers[1].tokens, server.tiers[1].capacity_tokens),
        )
