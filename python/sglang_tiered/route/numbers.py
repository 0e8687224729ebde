"""``Numbers``: what the picker counts, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang_tiered.route.picker import Picked, Refused

if TYPE_CHECKING:
    from sglang_tiered.route.fleet import Fleet
    from sglang_tiered.route.tokens import TokenReader

__all__ = ["Numbers"]

_PREFIX = "sglang_tiered_route_"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_TTFT_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Numbers:
    """Of one picker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.picks = self._counter("picks", "Requests that were sent somewhere.", "by", "retry")
        self.refused = self._counter("refused", "Requests that were refused.", "class", "status")
        self.tokens = self._counter(
            "prompt_tokens", "Of picked requests, by where they lie.", "tier"
        )
        self.answers = self._counter(
            "answers", "Heads of answers that came back.", "status", "as_picked"
        )
        self.unanswered = self._counter(
            "unanswered", "Picked requests without a head: their server or their client went away."
        )
        self.late = self._gauge(
            "late_prompts", "Prompts that went by their bytes, for want of time."
        )
        self.servers = self._gauge("servers", "Servers, by whether they take requests.", "state")
        self.pages = self._gauge("pages", "Pages that servers are known to hold.")
        self.seconds = Histogram(
            f"{_PREFIX}pick_seconds",
            "From the whole body to the pick.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.ttft = Histogram(
            f"{_PREFIX}ttft_seconds",
            "From the pick to the first token of a stream.",
            buckets=_TTFT_SECONDS,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{_PREFIX}{name}", text, labels, registry=self.registry)

    def decided(self, answer: Picked | Refused, seconds: float, is_retry: bool) -> None:
        """Count a decision."""
        self.seconds.observe(seconds)
        if isinstance(answer, Refused):
            self.refused.labels(answer.klass, str(answer.status)).inc()
            return
        self.picks.labels(answer.by, "yes" if is_retry else "no").inc()
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
        ready = sum(one.is_ready(now_s) for one in fleet.members.values())
        self.servers.labels("ready").set(ready)
        self.servers.labels("other").set(len(fleet.members) - ready)
        replicas = (one for member in fleet.members.values() for one in member.replicas.values())
        self.pages.set(sum(fleet.index.num_pages(one.place) for one in replicas))
        self.late.set(reader.num_late)
        return generate_latest(self.registry)
