"""The live side: one fresh server, what it takes for requests one at a time, then a trace."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from serving_bench.client import Request, Sample, ask_each, ask_timed
from serving_bench.conversations import random_tokens
from serving_bench.setting import PAGE_SIZE
from serving_bench.systems import start_fleet
from sglang_tiered.policy.server_costs import parse_server_costs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from serving_bench.setting import Geometry
    from serving_bench.systems import System


EXTRA = ("--disable-overlap-schedule",)
"""On a CPU launching a batch is computing it, so with overlap an answer is told a batch late."""

LENGTHS = (128, 384, 768, 1152, 1536, 1920)
NUM_OF_EACH = 4
NUM_SHORT, PAUSE_S = 10, 0.5
NUM_ANSWER = 33
AT_ONCE = 4


@dataclass(frozen=True)
class Measured:
    """What a server takes, by requests of their own before the trace. Prefill, copies and loads as
    the server says itself (``GET /tier/costs``), a decode step and what a request takes beside
    its prefill as its client sees them."""

    prefill: tuple[float, ...]  # per batch, token, pair of tokens, token copied from host memory
    nvme: tuple[float, ...]  # per load, byte
    step_s: tuple[float, float]  # one, and each request in it
    outside_s: float  # of a time to the first token, beside the prefill's batch
    token_bytes: int
    chunk_tokens: int


def ask_server(
    model: Path,
    folder: Path,
    geometry: Geometry,
    num_output: int,
    spaced: Callable[[Measured], Sequence[Request]],
) -> tuple[Measured, list[Sample], int]:
    """Start a server, measure it, ask what ``spaced`` makes of that. Returns also the tokens of its
    host memory."""
    with start_fleet(("tiered",), geometry, model=model, folder=folder, extra=EXTRA) as fleet:
        system = fleet["tiered"]
        measured = _measure(system, geometry, num_output)
        system.server.flush()
        samples = ask_timed(system.url, spaced(measured))
        return measured, samples, system.host_tokens


def _measure(system: System, geometry: Geometry, num_output: int) -> Measured:
    source = random.Random("measured")
    # All begin with one page, as those of a trace with a system prompt do: attention to what was
    # cached is another kernel's work.
    first = random_tokens(source, PAGE_SIZE)

    def fresh(length: int, num_output: int = num_output) -> Request:
        prompt = (*first, *random_tokens(source, length))
        return Request("measured", prompt, num_output)

    url, longest = system.url, LENGTHS[-1]
    # All of the memory has been touched before anything is timed.
    ask_each(url, [fresh(longest) for _ in range(geometry.host_tokens // longest + 2)])
    # With pauses, as a first request after some has more to wake up.
    short = ask_timed(url, [replace(fresh(LENGTHS[0]), at_s=n * PAUSE_S) for n in range(NUM_SHORT)])
    steps = [
        _step_s(ask_each(url, [fresh(LENGTHS[0], NUM_ANSWER) for _ in range(number)], number))
        for number in (1, AT_ONCE)
    ]
    # New prompts, then the same from NVMe, host memory and the device, one beside another.
    known = [fresh(length) for length in LENGTHS for _ in range(NUM_OF_EACH)]
    source.shuffle(known)
    ask_each(url, known, 2)
    system.server.flush()
    again = [
        replace(one, prompt=(*one.prompt, *random_tokens(source, 2 * PAGE_SIZE))) for one in known
    ]
    ask_each(url, again, 2)
    ask_each(url, again[-NUM_SHORT:], 2)
    ask_each(url, [fresh(length) for length in (*LENGTHS, *reversed(LENGTHS))], 2)
    costs = parse_server_costs(json.dumps(system.server.request("/tier/costs")).encode()).ranks[0]
    prefill = costs.prefill.prices
    new = LENGTHS[0]  # behind the first page
    batch_s = float(np.dot(prefill[:3], (1, new, new * (PAGE_SIZE + new / 2))))
    each_s = max(0.0, (steps[1] - steps[0]) / (AT_ONCE - 1))
    return Measured(
        prefill=prefill,
        nvme=costs.tiers["nvme"].prices,
        step_s=(steps[0] - each_s, each_s),
        outside_s=max(0.0, statistics.median(sample.ttft_s for sample in short) - batch_s),
        token_bytes=costs.kv_bytes_per_token,
        chunk_tokens=system.server.request("/server_info")["chunked_prefill_size"],
    )


def _step_s(samples: Sequence[Sample]) -> float:
    return statistics.median(gap for sample in samples for gap in sample.itl_s[4:])
