"""Runs policies over a trace, server group by server group, and adds up what they did.

Servers share nothing, so they need not run at once: a group is as many as fit the memory that a
replay may take, and the trace is streamed once per group, policy and size.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered_lab.trace.replay.belady import BeladyStack, RunCursor
from sglang_tiered_lab.trace.replay.hicache import HiCacheStack
from sglang_tiered_lab.trace.replay.lru import LruStack, lengths_of
from sglang_tiered_lab.trace.replay.next_use import NextUse
from sglang_tiered_lab.trace.replay.server import Server
from sglang_tiered_lab.trace.replay.tiered import TieredStack
from sglang_tiered_lab.trace.replay.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered_lab.trace.replay.server import Stack
    from sglang_tiered_lab.trace.replay.sizes import TierSizes
    from sglang_tiered_lab.trace.replay.stream import TraceStream
    from sglang_tiered_lab.trace.replay.timing import Hardware


FORESEEING = ("belady", "infinite")

MAX_UNITS_AT_ONCE = 4_000_000
"""Of all servers of a group and all their tiers, some 200 bytes each."""

_STEP = 2000  # requests between two looks at the clock


@dataclass(frozen=True)
class Replay:
    """Says what to run: every policy at every size. ``only`` is a part of the servers to simulate:
    they share nothing, so parts of a fleet may run one by one or on several machines."""

    stream: TraceStream
    hardware: Hardware
    policies: Sequence[str]
    sizes: Sequence[TierSizes]
    num_servers: int = 1
    only: range | None = None

    @property
    def servers(self) -> range:
        return range(self.num_servers) if self.only is None else self.only


@dataclass
class Run:
    """Holds the result of one policy at one size, and what it took to simulate it."""

    policy: str
    sizes: TierSizes
    totals: Totals
    wall_s: float = 0.0


def replay(plan: Replay, step: Callable[[int], None] = lambda _: None) -> list[Run]:
    """All runs, policies at the first size first. ``step`` is told of requests as they are done;
    in all there are ``num_steps`` of them."""
    runs = [Run(policy, sizes, Totals()) for sizes in plan.sizes for policy in plan.policies]
    for group in _groups(plan):
        with contextlib.ExitStack() as exits:
            future = None
            if any(policy in FORESEEING for policy in plan.policies):
                future = exits.enter_context(NextUse())
                _look_ahead(plan, group, future, step)
            for run in runs:
                start = time.perf_counter()
                _run_group(plan, group, run, future, step)
                run.wall_s += time.perf_counter() - start
    for run in runs:
        run.totals.check_integrity()
    return runs


def num_steps(plan: Replay) -> int:
    passes = len(plan.sizes) * len(plan.policies)
    passes += any(policy in FORESEEING for policy in plan.policies)
    # For a part of the servers, about as many: the requests are not routed yet.
    return plan.stream.survey.num_requests * len(plan.servers) // plan.num_servers * passes


def _groups(plan: Replay) -> list[range]:
    unit_tokens = plan.stream.survey.unit_tokens
    largest = max(
        sizes.device_tokens + sizes.host_tokens + sizes.nvme_tokens for sizes in plan.sizes
    )
    # No server holds more than comes to it.
    share = plan.stream.survey.num_unique_units // plan.num_servers + 1
    per_server = max(1, min(largest // unit_tokens, 3 * share))
    servers = plan.servers
    size = max(1, min(len(servers), MAX_UNITS_AT_ONCE // per_server))
    starts = range(servers.start, servers.stop, size)
    return [range(start, min(start + size, servers.stop)) for start in starts]


def _look_ahead(plan: Replay, group: range, future: NextUse, step: Callable[[int], None]) -> None:
    unit_tokens = plan.stream.survey.unit_tokens
    done = 0
    for server, request in plan.stream.routed(group):
        lengths = lengths_of(len(request.units), request.input_tokens, unit_tokens)
        future.add(request.units, lengths, server)
        done += 1
        if done % _STEP == 0:
            step(_STEP)
    future.finish()
    step(done % _STEP)


def _run_group(
    plan: Replay, group: range, run: Run, future: NextUse | None, step: Callable[[int], None]
) -> None:
    cursor = RunCursor(future.runs()) if future is not None else None
    unit_tokens = plan.stream.survey.unit_tokens
    servers = [
        Server(_make_stack(plan, run, cursor), plan.hardware, run.totals, unit_tokens=unit_tokens)
        for _ in group
    ]
    first, done = group.start, 0
    for number, request in plan.stream.routed(group):
        servers[number - first].submit(request)
        done += 1
        if done % _STEP == 0:
            step(_STEP)
    for server in servers:
        server.close()
        server.check_integrity()
    step(done % _STEP)


def _make_stack(plan: Replay, run: Run, cursor: RunCursor | None) -> Stack:
    unit_tokens = plan.stream.survey.unit_tokens
    sizes, hardware, totals = run.sizes, plan.hardware, run.totals
    if run.policy in FORESEEING:
        assert cursor is not None
        return BeladyStack(
            sizes,
            hardware,
            totals,
            unit_tokens=unit_tokens,
            cursor=cursor,
            is_infinite=run.policy == "infinite",
        )
    kinds: dict[str, type[LruStack | HiCacheStack | TieredStack]] = {
        "lru": LruStack,
        "hicache": HiCacheStack,
        "tiered": TieredStack,
    }
    return kinds[run.policy](sizes, hardware, totals, unit_tokens=unit_tokens)


def check_sizes(policies: Sequence[str], sizes: TierSizes) -> None:
    """Raise ``ConfigError`` for what no server could run."""
    through_host = [policy for policy in policies if policy in ("hicache", "tiered")]
    if through_host and sizes.nvme_tokens and sizes.host_tokens <= sizes.device_tokens:
        raise ConfigError(
            f"--host ({sizes.host_tokens:,} tokens) must be larger than --device "
            f"({sizes.device_tokens:,}) for {' and '.join(through_host)}, which write through host "
            "memory; raise it, or lower --device."
        )
