"""Modelled time: who waits for what, and for how long."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sglang_tiered_lab.trace.replay.disk import Disk
from sglang_tiered_lab.trace.replay.hicache import HiCacheStack
from sglang_tiered_lab.trace.replay.lru import LruStack
from sglang_tiered_lab.trace.replay.server import Request, Server, Stack
from sglang_tiered_lab.trace.replay.sizes import TierSizes
from sglang_tiered_lab.trace.replay.tiered import STALE_AFTER_S, TieredStack
from sglang_tiered_lab.trace.replay.timing import Hardware
from sglang_tiered_lab.trace.replay.totals import Totals

ROOT = Path(__file__).resolve().parents[4]
UNIT = 64
# One second of prefill per unit; a unit of 64,000 bytes.
HARDWARE = Hardware(
    kv_bytes_per_token=1000,
    prefill_fixed_s=0.0,
    prefill_token_s=1 / UNIT,
    prefill_pair_s=0.0,
    host_bytes_per_s=1e12,
    host_fixed_s=0.0,
    nvme_read_bytes_per_s=640_000.0,  # ten units a second
    nvme_write_bytes_per_s=6.4e9,
    nvme_fixed_s=0.0,
)
SLOW_LOADS = dataclasses.replace(HARDWARE, nvme_read_bytes_per_s=6_400.0)  # ten seconds a unit


def sizes(device: int, host: int, nvme: int, writes_per_day: int | None = None) -> TierSizes:
    """In units."""
    nvme_bytes = nvme * UNIT * HARDWARE.kv_bytes_per_token
    return TierSizes(
        device_tokens=device * UNIT,
        host_tokens=host * UNIT,
        nvme_tokens=nvme * UNIT,
        nvme_bytes=nvme_bytes,
        region_bytes=max(4096 * 40, nvme_bytes // 16 // 4096 * 4096),
        writes_per_day=writes_per_day,
    )


def request(arrival_s: float, *units: int) -> Request:
    return Request(arrival_s, UNIT * len(units), 1, list(units), returning=False)


FILLERS = [request(20 * i, *range(100 * i, 100 * i + 9)) for i in range(1, 6)]
"""They put a prompt of before out of memory."""


def serve(
    kind: type[LruStack | HiCacheStack | TieredStack],
    tiers: TierSizes,
    requests: list[Request],
    hardware: Hardware = HARDWARE,
) -> tuple[Totals, Stack]:
    totals = Totals()
    stack: Stack = kind(tiers, hardware, totals, unit_tokens=UNIT)
    server = Server(stack, hardware, totals, unit_tokens=UNIT)
    for one in requests:
        server.submit(one)
    server.close()
    server.check_integrity()
    totals.check_integrity()
    return totals, stack


def test_a_hit_costs_its_new_tokens_or_one() -> None:
    totals, _ = serve(
        LruStack, sizes(10, 0, 0), [request(0, 1, 2), request(10, 1, 2, 3), request(20, 1, 2)]
    )
    assert totals.ttft.sum_s == pytest.approx(2 + 1 + 1 / UNIT)
    assert totals.prefill_saved_s == pytest.approx(2 + 2 - 1 / UNIT)
    assert totals.units_hit == {"device": 4, "host": 0, "nvme": 0}


def test_hicache_goes_on_without_pages_after_its_deadline() -> None:
    """One unit of 64 tokens takes 10 s: 1 s and 0.25 s per 1,024 tokens later nothing is there."""
    prompt = [request(0, 1, 2, 3, 4), *FILLERS, request(200, 1, 2, 3, 4)]
    totals, _ = serve(HiCacheStack, sizes(10, 20, 400), prompt, SLOW_LOADS)
    assert totals.loads_cut_off == 1
    assert totals.units_hit["nvme"] == 0
    assert totals.ttft.max_s == pytest.approx(9)
    assert totals.nvme_bytes_wasted == 4 * UNIT * 1000


def test_tiered_computes_what_would_take_longer_to_load() -> None:
    """The first loads show how slow the disk is; after that nothing is loaded, nobody waits."""
    chains = [[1000 * i, 1000 * i + 1, 1000 * i + 2, 1000 * i + 3] for i in range(1, 8)]
    first = [request(20 * i, *chain) for i, chain in enumerate(chains)]
    filler = [request(200 + 20 * i, *range(100 * i, 100 * i + 9)) for i in range(5)]
    back = [request(400 + 100 * i, *chain) for i, chain in enumerate(chains)]
    totals, _ = serve(TieredStack, sizes(10, 20, 4000), [*first, *filler, *back], SLOW_LOADS)
    assert totals.loads_begun <= 2
    assert totals.loads_declined >= 5
    assert totals.ttft.max_s <= 10


def test_tiered_keeps_its_write_budget_and_counts_drops() -> None:
    unit_bytes = UNIT * HARDWARE.kv_bytes_per_token
    prompts = [request(20 * i, *range(10 * i, 10 * i + 9)) for i in range(100)]
    free, _ = serve(TieredStack, sizes(10, 20, 4000), prompts)
    assert free.nvme_bytes_stored == 900 * unit_bytes
    budget = 900 * unit_bytes  # a tenth of it may be written at once, the rest over a day
    held, _ = serve(TieredStack, sizes(10, 20, 4000, budget), prompts)
    assert held.nvme_bytes_stored < 0.2 * budget
    assert sum(held.units_dropped.values()) > 700
    assert held.units_lost_unstored > 0


def test_loads_and_stores_share_all_device_time() -> None:
    disk = Disk(dataclasses.replace(HARDWARE, nvme_write_bytes_per_s=640_000.0))
    disk.store(0.0, 640_000)  # one second alone
    begin_s, end_s = disk.load(0.0, 640_000)  # likewise; gets four fifths of the device
    assert (begin_s, end_s) == (0.0, pytest.approx(1.25))
    assert disk.store_end_s == pytest.approx(2.0)
    assert disk.load(1.0, 64_000)[0] == pytest.approx(1.25)  # in order


def test_staleness_is_that_of_the_server() -> None:
    """Read as text: the server's modules need SGLang."""
    folder = ROOT / "python/sglang_tiered/integration"
    text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
    staleness = re.findall(r"^STALE_AFTER_S = \{Tier.NVME: ([\d.]+),", text, re.MULTILINE)
    assert [float(seconds) for seconds in staleness] == [STALE_AFTER_S]
