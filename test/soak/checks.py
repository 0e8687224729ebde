"""What must be so once a life has come to rest."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import psutil
import report
from clients import ask
from life import Life, Violation
from operator_actions import flush_until_empty
from rest import drained

NUM_PROBES = 3
SLACK_THREADS, SLACK_DESCRIPTORS = 8, 32
GAUGES = (
    "tier_inflight_jobs:peer",
    "tier_queued_store_bytes:object",
    "peer_servers_withheld",
    "spill_waiting_tokens",
    "spill_inflight_tokens",
    "tier_inflight_jobs:nvme",
    "tier_queued_store_bytes:nvme",
    "demotion_backlog_pages",
)
TROUBLE = re.compile(
    r"Traceback|memory leak|[Ee]xception in|Scheduler hit|Segmentation|RuntimeError|AssertionError"
)
ALLOWED = ("post-warmup freeze_gc failed",)
"""Messages that look like trouble with what follows them, and are none. SGLang asks itself to
freeze its garbage collector, at times before it listens."""


@dataclass
class Resources:
    """Threads and descriptors of each server process at its first rest."""

    first: dict[int, tuple[int, int]] = field(default_factory=dict)

    def check(self, life: Life) -> None:
        for role, server in life.world.servers.items():
            regions = (life.world.folder / f"kv-{role}").rglob("region-*.kv")
            num_files = len(list(regions))
            parent = psutil.Process(server.process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                now = process.num_threads(), process.num_fds() - num_files
                threads, descriptors = self.first.setdefault(process.pid, now)
                if now[0] > threads + SLACK_THREADS or now[1] > descriptors + SLACK_DESCRIPTORS:
                    raise Violation(
                        f"{role}: process {process.pid} ({process.name()}) has {now[0]} threads "
                        f"and {now[1]} descriptors but for {num_files} regions, after "
                        f"{threads} and {descriptors} at its first rest"
                    )


def at_rest(life: Life, source: random.Random, resources: Resources) -> None:
    """Waits until nothing is under way; nothing is left over, lost or wrong then."""
    nobody_died(life)
    life.until(lambda: left_over(life), "is still under way")
    flush_until_empty(life)
    for _ in range(NUM_PROBES):
        prompt = life.conversations.any_held(source)
        if prompt is not None:
            ask(life, source, prompt)
    life.until(lambda: left_over(life), "is still under way")
    gives_everything_up(life, source)
    nobody_died(life)
    resources.check(life)
    seen = report.read(life.world.report)
    if seen.violations:
        raise Violation(f"the asynchronous platform saw:\n{seen.told()}")


def gives_everything_up(life: Life, source: random.Random) -> None:
    """Locks and lost pages of host memory, which a flush would hide."""
    if life.world.setup.topology == "ranks":
        return
    order = f"{source.getrandbits(64):016x}"
    life.world.drain(order)
    wanted = len(life.world.servers)

    def missing() -> int:
        seams = report.read(life.world.report).seams
        return wanted - sum(seam.startswith(drained(order, 0)[:-1]) for seam in seams)

    life.until(missing, "schedulers did not come to rest")


def left_over(life: Life) -> dict[str, Any]:
    """What is under way, or ill."""
    left: dict[str, Any] = {}
    for role, server in life.world.servers.items():
        (state, *_) = server.request("/server_info")["internal_states"]
        tiers = state["sglang_tiered"]
        left |= {f"{role} {name}": tiers[name] for name in GAUGES if tiers.get(name)}
        for name in ("tier_healthy:nvme", "tier_healthy:object", "tier_healthy:peer"):
            if tiers.get(name, 1) != 1:
                left[f"{role} {name}"] = tiers.get(name.replace("healthy", "unhealthy_because"))
        if rooms := state.get("sglang_tiered_transfer", {}).get("transfer_rooms", 0):
            left[f"{role} rooms"] = rooms
        text = str(life.world.ask(role, "/metrics").body)
        asked = re.findall(r"^(sglang:num_(?:running|queue)_reqs)\{[^}]*\} (\S+)$", text, re.M)
        left |= {f"{role} {name}": value for name, value in asked if float(value)}
    return left


def nobody_died(life: Life) -> None:
    for role, server in life.world.servers.items():
        code = server.process.poll()
        if code is not None:
            raise Violation(f"{role} ended with {code}:\n{server.log[-3000:]}")
        if life.world.ask(role, "/health").status != 200:
            raise Violation(f"{role} is not healthy:\n{server.log[-3000:]}")
    for log in sorted(life.world.folder.glob("*.log")):
        lines, is_allowed = log.read_text(errors="replace").splitlines(), False
        for number, line in enumerate(lines):
            if line.startswith("["):  # a message; what it brings follows it
                is_allowed = any(allowed in line for allowed in ALLOWED)
            if TROUBLE.search(line) and not is_allowed:
                around = "\n".join(lines[max(0, number - 5) : number + 30])
                raise Violation(f"{log.name} has trouble in line {number + 1}:\n{around}")
