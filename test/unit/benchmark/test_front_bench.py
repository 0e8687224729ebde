"""A modelled fleet answers over HTTP as real servers do, and counts what it is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from bench_routing import Scale, make_plan
from bench_routing_front import ratios
from front_bench.modelled import UNIT_TOKENS, ModelledFleet, ids_of
from server_process import free_ports
from sglang_tiered.policy.server_costs import parse_server_costs
from sglang_tiered_lab.trace.replay.server import Request

DEADLINE_S = 60.0
FIRST = Request(0.0, 3 * UNIT_TOKENS, 1, (11, 12, 13), returning=False)
SECOND = Request(0.0, 3 * UNIT_TOKENS, 1, (11, 12, 14), returning=True)


def test_fleet_serves_and_tells_what_it_holds() -> None:
    requests = [FIRST, SECOND]

    async def run() -> None:
        ports = [free_ports(2) for _ in range(8)]
        fleet = ModelledFleet(make_plan(scale=Scale(8, 2)), requests, ports, is_priced=True)
        await fleet.start()
        url = f"http://127.0.0.1:{ports[1]}"
        try:
            async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
                for number, one in enumerate(requests):
                    body: dict[str, Any] = {"prompt": ids_of(one), "user": str(number)}
                    async with session.post(f"{url}/v1/completions", json=body) as answer:
                        assert (await answer.text()).endswith("[DONE]\n\n")
                async with session.get(f"{url}/tier/costs") as answer:
                    costs = parse_server_costs(await answer.read())
        finally:
            await fleet.close()
        (record,) = costs.ranks
        assert record.page_tokens == UNIT_TOKENS and record.decode.requests == 0
        assert costs.events is not None and costs.events.port == ports[1] + 1
        assert fleet.num_served == [0, 2] + [0] * 6
        assert (fleet.cached_tokens, fleet.prompt_tokens) == (2 * UNIT_TOKENS, 6 * UNIT_TOKENS)

    asyncio.run(run())


def test_ratios_are_of_equal_windows() -> None:
    def row(arm: str, seed: int, seconds: float) -> dict[str, Any]:
        place = {"trace": "synthetic", "seed": seed, "load": 1.0, "arm": arm}
        return {**place, "mean_ttft_s": seconds, "p99_ttft_s": 2 * seconds, "within": 1 / seconds}

    rows = [row("cost", 0, 1.0), row("other", 0, 2.0), row("cost", 1, 3.0), row("other", 1, 4.0)]
    found = ratios([*rows, row("other", 2, 9.0)])
    ratio = {"value": 0.625, "min": 0.5, "max": 0.75, "n": 2}
    assert found["synthetic_cost_over_other_1_mean_ttft"] == ratio
    assert found["synthetic_other_1_within_limit"]["value"] == 0.25
