"""``Numbers``: what the picker counts, for Prometheus."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Enum,
    Gauge,
    Histogram,
    generate_latest,
)

from sglang_tiered.policy.balance import HALVES, HOLDS
from sglang_tiered.route.picker import Picked, Refused

if TYPE_CHECKING:
    from sglang_tiered.policy.balance import RoleBalance
    from sglang_tiered.route.fleet import Fleet
    from sglang_tiered.route.tokens import TokenReader


_NAMESPACE = "sglang_tiered_route"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_TTFT_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


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
        members, ready = fleet.members.values(), len(fleet.usable(now_s))
        self.servers.labels("ready").set(ready)
        self.servers.labels("other").set(len(members) - ready)
        places = (replica.place for one in members for replica in one.replicas.values())
        self.pages.set(sum(map(fleet.index.num_pages, places)))
        self.late.set(reader.num_late)
        return generate_latest(self.registry)
