"""What a run of a modelled cluster is: its servers, their policy, and what befalls them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_tiered_lab.trace.cluster.books import Knowledge
from sglang_tiered_lab.trace.cluster.routers import Tuning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.cluster.profiles import Kind


@dataclass(frozen=True, kw_only=True)
class Member:
    """A server: its kind, and its role (both, prefill, decode)."""

    kind: Kind
    role: str = "both"


@dataclass(frozen=True, kw_only=True)
class Change:
    """At ``at_s`` server number ``server`` dies, drains or joins; one that joins first is away
    before."""

    at_s: float
    what: str
    server: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. Times of requests are divided by ``speed``. ``classes`` are shares of the
    conversations, the most important first; ``tiers`` are those that servers have.
    ``cooldown_s`` is the least time between two servers that change their roles; without it they
    keep them."""

    members: Sequence[Member]
    policy: str
    unit_tokens: int
    speed: float = 1.0
    ttft_s: float = 2.0
    tpot_s: float = 0.1
    admission: str = "none"
    max_waiting: int = 16
    classes: Sequence[float] = (1.0,)
    tiers: frozenset[str] = frozenset({"host", "nvme", "peer"})
    knowledge: Knowledge = field(default_factory=Knowledge)
    tuning: Tuning = field(default_factory=Tuning)
    changes: Sequence[Change] = ()
    cooldown_s: float | None = None
    seed: int = 0
