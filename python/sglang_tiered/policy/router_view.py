"""``RouterView``: what a router makes of servers' cost records, and of nothing else.

Each data-parallel replica is a server of its own here. The simulated router and a real one both
hear of servers in this way only.

Pure: records in, times of the caller's clock passed in. Not thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from sglang_tiered.policy.routing import DecodeState, ServerState
from sglang_tiered.policy.server_costs import TIERS

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from sglang_tiered.policy.cost_model import CostModel
    from sglang_tiered.policy.server_costs import RankCosts

__all__ = ["RouterView", "step_prices"]

MICROSECOND = 1e-6


class RouterView:
    """``states`` and ``decode_states`` are those that ``choose_server`` and ``choose_decode`` take:
    one of each server, in the order in which they were added, and the same from report to report.
    """

    def __init__(self) -> None:
        self.states: list[ServerState] = []
        self.decode_states: list[DecodeState] = []
        # Servers with equal prices share one: of those that hold the same, one is priced.
        self._models: WeakValueDictionary[Hashable, CostModel] = WeakValueDictionary()

    def add(self, record: RankCosts, now_s: float) -> int:
        """Begin with the first record of a server; returns its position."""
        self.states.append(ServerState(self._model(record)))
        self.decode_states.append(DecodeState((0.0, 0.0), 1))
        self.report(len(self.states) - 1, record, now_s)
        return len(self.states) - 1

    def replace(self, server: int, record: RankCosts, now_s: float) -> None:
        """Begin with another server at the position of one that is gone: what was learnt of that
        goes."""
        self.states[server] = ServerState(self._model(record))
        self.decode_states[server] = DecodeState((0.0, 0.0), 1)
        self.report(server, record, now_s)

    def report(self, server: int, record: RankCosts, now_s: float) -> None:
        """Take in a record, answered at ``now_s``, of the server at this position. What was learnt
        of its answers stays, and so does what was sent to it since the snapshot."""
        state = self.states[server]
        state.costs = self._model(record)
        state.host_token_s = record.prefill.prices[3]
        state.busy, state.service_s = record.busy, record.service_s
        state.ahead, state.always_loads = record.ahead_tokens, record.always_loads
        state.reported(
            now_s,
            queue_s=record.queue_wait_s,
            left_s=record.left_s,
            num_others=record.num_others,
            age_s=record.age_s,
        )
        decode = self.decode_states[server]
        decode.prices = step_prices(record.decode.moments)
        decode.max_tokens = max(1, record.device.capacity_tokens)
        decode.reported(
            now_s,
            num_running=record.decode.requests + record.waiting.requests,
            num_tokens=record.device.held_tokens,
            age_s=record.age_s,
        )

    def _model(self, record: RankCosts) -> CostModel:
        tiers = tuple(record.tiers[name].prices for name in TIERS)
        sizes = (record.page_tokens, record.kv_bytes_per_token)
        key = (record.prefill.prices, tiers, sizes)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = record.cost_model()
        return model


def step_prices(moments: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of a decode step, and per request in it, by least squares over the steps
    that are summed up. What a token of keys and values adds is in the price per request."""
    steps, requests, microseconds, squares, products, _ = moments
    if steps < 1 or requests < steps:
        return 0.0, 0.0  # there were none, or the sums are not of any
    spread = steps * squares - requests * requests
    per_request = (steps * products - requests * microseconds) / spread if spread > 0 else 0.0
    per_request = min(max(0.0, per_request), microseconds / requests)
    fixed = max(0.0, microseconds - per_request * requests) / steps
    return MICROSECOND * fixed, MICROSECOND * per_request
