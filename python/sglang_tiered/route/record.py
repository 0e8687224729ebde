"""What a picker tells of its requests: ``Numbers``, which Prometheus reads, and by ``Recorder`` a
trace in Mooncake's format, which ``sglang-tiered trace`` reads.

A trace holds times, lengths and names of the prompts' blocks, no text.

Blocks are named under a secret of this process, so that nobody finds out from the file what a
prompt said; equal prompts have equal names until the next start. The length of an answer does not
come through here: the most that was asked for stands in its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING

import aiofiles
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Enum,
    Gauge,
    Histogram,
    generate_latest,
)

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import MiB
from sglang_tiered.policy.balance import HALVES, HOLDS
from sglang_tiered.request_log import older, open_log
from sglang_tiered.route.picker import Picked, Refused
from sglang_tiered.route.prompt import page_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_tiered.policy.balance import RoleBalance
    from sglang_tiered.route.fleet import Fleet
    from sglang_tiered.route.prompt import Prompt, TokenReader


_NAMESPACE = "sglang_tiered_route"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_TTFT_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

BLOCK_TOKENS = 512
MAX_WAITING = 10_000
MAX_BYTES = 256 * MiB

logger = logging.getLogger(__name__)


class Numbers:
    """Of one picker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=_NAMESPACE, registry=self.registry)
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=self.registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=self.registry)
        self.picks = counter(
            "picks", "Requests that were sent somewhere.", ("by", "retry", "computes_on")
        )
        self.refused = counter("refused", "Requests that were refused.", ("class", "status"))
        self.tokens = counter("prompt_tokens", "Of picked requests, by where they lie.", ("tier",))
        self.answers = counter("answers", "Heads that came back.", ("status", "as_picked"))
        self.unanswered = counter(
            "unanswered", "Picked requests without a head: their server or their client went away."
        )
        self.late = gauge("late_prompts", "Prompts that went by their bytes, for want of time.")
        self.servers = gauge("servers", "Servers, by whether they take requests.", ("state",))
        self.pages = gauge("pages", "Pages that servers are known to hold.")
        self.seconds = histogram(
            "pick_seconds", "From the whole body to the pick.", buckets=_SECONDS
        )
        self.ttft = histogram(
            "ttft_seconds", "From the pick to the first token of a stream.", buckets=_TTFT_SECONDS
        )

        self.switches = counter(
            "role_switches", "Servers asked to take a role.", ("role", "outcome")
        )
        self.load = gauge("role_load", "Servers that a role has work for.", ("role",))
        self.headroom = gauge(
            "headroom",
            "How many times their load servers could do, as now and at best.",
            ("split",),
        )
        self.balance = Enum(
            "balance",
            "What the last look at the roles came to.",
            namespace=_NAMESPACE,
            registry=self.registry,
            states=("off", "failed", *HOLDS),
        )

    def balanced(self, policy: RoleBalance) -> None:
        """Note a look at the roles."""
        self.balance.state(policy.why)
        for role, load in zip(HALVES, policy.loads, strict=True):
            self.load.labels(role).set(load)
        for split, times in zip(("now", "best"), policy.headrooms, strict=True):
            self.headroom.labels(split).set(times)

    def decided(self, answer: Picked | Refused, seconds: float, is_retry: bool) -> None:
        """Count a decision."""
        self.seconds.observe(seconds)
        if isinstance(answer, Refused):
            self.refused.labels(answer.klass, str(answer.status)).inc()
            return
        on = "" if answer.replica is None else answer.replica.record.computes_on
        self.picks.labels(answer.by, "yes" if is_retry else "no", on).inc()
        held = answer.held
        for tier in ("device", "host", "nvme", "peer", "object"):
            self.tokens.labels(tier).inc(getattr(held, tier))
        known = held.device + held.host + held.num_loadable
        self.tokens.labels("none").inc(max(0, answer.prompt.num_tokens - known))

    def answered(self, picked: Picked, status: str, served: str, seconds: float) -> None:
        """Count the head of an answer."""
        is_first = served == picked.targets[0].address
        self.answers.labels(status, "yes" if is_first else "no").inc()
        if picked.prompt.is_stream and status == "200":
            self.ttft.observe(seconds)

    def text(self, fleet: Fleet, reader: TokenReader, now_s: float) -> bytes:
        """Return all of it as Prometheus reads it."""
        ready = len(fleet.usable(now_s))
        self.servers.labels("ready").set(ready)
        self.servers.labels("other").set(len(fleet.members) - ready)
        self.pages.set(sum(len(one.pages) for one in fleet.replicas()))
        self.late.set(reader.num_late)
        return generate_latest(self.registry)


class Recorder:
    """Writes to ``path``, which is renamed to ``path.1`` when it is full. Of one event loop. Raises
    ``ConfigError`` for a file that cannot be written."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            os.close(open_log(path))
        except OSError as error:
            raise ConfigError(
                f"--record {path} cannot be written ({error.strerror}); name a file in a directory "
                "that exists, or drop it."
            ) from error
        self._path, self._max_bytes, self._clock = path, max_bytes, clock
        self._started_s = clock()
        self._secret = secrets.token_hex(16)
        self._waiting: asyncio.Queue[tuple[float, Prompt]] = asyncio.Queue(MAX_WAITING)

    def note(self, prompt: Prompt) -> None:
        """Have a request written, unless too many came, or its tokens are not known. Waits for
        nothing."""
        if prompt.ids is not None and not self._waiting.full():
            self._waiting.put_nowait((self._clock() - self._started_s, prompt))

    async def run(self) -> None:
        """Write until cancelled. What is not written then is lost."""
        while True:
            try:
                await self._fill()
                os.replace(self._path, older(self._path))
            except OSError as error:
                logger.warning("--record %s ends here: %s", self._path, error.strerror)
                return

    async def _fill(self) -> None:
        """Append to the file until it is full."""
        async with aiofiles.open(open_log(self._path), "ab", buffering=0) as file:
            num_bytes = await file.seek(0, os.SEEK_END)
            while num_bytes < self._max_bytes:
                at_s, prompt = await self._waiting.get()
                line = await asyncio.to_thread(self._line, at_s, prompt)
                await file.write(line)
                num_bytes += len(line)

    def _line(self, at_s: float, prompt: Prompt) -> bytes:
        assert prompt.ids is not None
        tenant = f"{self._secret}:{prompt.extra_key or ''}"
        row = {
            "timestamp": round(at_s * 1000),
            "input_length": len(prompt.ids),
            "output_length": prompt.max_new,
            "hash_ids": page_keys(prompt.ids, BLOCK_TOKENS, tenant, prompt.cache_salt),
        }
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"
