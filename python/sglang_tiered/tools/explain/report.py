"""What ``explain`` prints: of a file, of the slowest requests in it, and of one."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.tools.explain.causes import (
    GENERATE,
    OTHERS,
    PREFILL,
    QUEUE,
    REST,
    cause,
    parts,
    seconds,
)
from sglang_tiered.tools.terminal import print_lines, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.request_log import RequestRecord

__all__ = ["Summary", "as_json", "print_one", "print_slowest", "print_summary"]

_NAMES = {
    QUEUE: "in the queue",
    "load": "waiting for its load",
    "window": "put off: other loads filled the window",
    "ranks": "put off: ranks had to agree",
    "stores": "put off: stores were in the way",
    "copies": "put off: what comes before was copied to host memory",
    "others": "waiting for loads of others that were nearly there",
    "back": "waiting for its back",
    PREFILL: "computing its prompt",
    OTHERS: "computing other prompts before its first token",
    REST: "other work before its first token",
    GENERATE: "generating the rest",
}
_SOURCES = ("device", "host", "nvme", "object", "peer", "computed")


@dataclass(slots=True)
class Summary:
    """Figures of all requests that were read."""

    num_requests: int = 0
    first_unix_s: float = 0.0
    last_unix_s: float = 0.0
    total_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)  # by source
    parts: Counter[str] = field(default_factory=Counter)  # seconds
    decisions: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, record: RequestRecord) -> None:
        at = record.arrived_unix_s
        self.first_unix_s = at if not self.num_requests else min(at, self.first_unix_s)
        self.last_unix_s = max(at, self.last_unix_s)
        self.num_requests += 1
        self.total_s.append(record.total_s)
        if record.first_token_s is not None:
            self.first_token_s.append(record.first_token_s)
        for name in _SOURCES:
            self.tokens[name] += getattr(record.tokens, f"num_{name}")
        for part in parts(record):
            self.parts[part.name] += part.seconds  # type: ignore[assignment]
        if record.plan is not None:
            self.decisions[record.plan.decision] += 1
        if record.given_up is not None:
            self.given_up[record.given_up.why] += 1
        self.ends[record.end] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "num_requests": self.num_requests,
            "first_arrived_unix_s": self.first_unix_s,
            "last_arrived_unix_s": self.last_unix_s,
            "total_s": _spread(self.total_s),
            "first_token_s": _spread(self.first_token_s),
            "num_tokens": dict(self.tokens),
            "parts_s": {name: round(took, 6) for name, took in self.parts.items()},
            "decisions": dict(self.decisions),
            "given_up": dict(self.given_up),
            "ends": dict(self.ends),
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the largest."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=20) if len(values) > 1 else [values[0]] * 19
    p95 = min(cuts[18], max(values))
    return {"p50": statistics.median(values), "p95": p95, "max": max(values)}


def as_json(record: RequestRecord) -> dict[str, Any]:
    """Return a request with its cause."""
    return {
        "rid": record.rid,
        "cause": cause(record),
        "parts": [part._asdict() for part in parts(record)],
        "record": msgspec.to_builtins(record),
    }


def print_summary(summary: Summary) -> None:
    if not summary.num_requests:
        print_lines(["no request was recorded"])
        return
    at = [_moment(when) for when in (summary.first_unix_s, summary.last_unix_s)]
    print_lines([f"{summary.num_requests:,} requests, arrived from {at[0]} to {at[1]}"])
    rows = []
    for name, values in (("first token", summary.first_token_s), ("whole", summary.total_s)):
        spread = _spread(values)
        if spread:
            rows.append((name, *(f"{seconds(spread[key])} s" for key in ("p50", "p95", "max"))))
    print_table(("", "p50", "p95", "max"), rows)
    num_tokens, took_s = sum(summary.tokens.values()), sum(summary.parts.values())
    print_table(
        ("prompt tokens", "number", "share"),
        [
            (name, f"{summary.tokens[name]:,}", _share(summary.tokens[name], num_tokens))
            for name in _SOURCES
            if summary.tokens[name]
        ],
    )
    print_table(
        ("where the time went", "seconds", "share"),
        [
            (_NAMES[name], seconds(took), _share(took, took_s))
            for name, took in summary.parts.most_common()
        ],
    )
    said = [
        f"{what}: " + ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
        for what, counts in (("plans", summary.decisions), ("given up", summary.given_up))
        if counts
    ]
    print_lines(said)


def print_slowest(records: Sequence[RequestRecord]) -> None:
    print_table(
        ("request", "why", "whole", "first token"),
        [
            (
                record.rid,
                cause(record),
                f"{seconds(record.total_s)} s",
                "never" if record.first_token_s is None else f"{seconds(record.first_token_s)} s",
            )
            for record in records
        ],
        left=2,
    )


def print_one(record: RequestRecord) -> None:
    """Print one request as a timeline, with what was planned and what was read."""
    of = f", replica {record.replica}" if record.replica else ""
    tenant = f", tenant {record.tenant}" if record.tenant else ""
    print_lines(
        [
            f"request {record.rid}, arrived at {_moment(record.arrived_unix_s)}{of}{tenant}",
            f"{record.num_prompt_tokens:,} tokens in, {record.num_output_tokens:,} out, "
            f"ended by {record.end} after {seconds(record.total_s)} s",
            cause(record),
        ]
    )
    print_table(
        ("what", "from", "took", "share"),
        [
            (
                _NAMES[part.name],
                f"{part.at_s:.3f} s",
                f"{part.seconds:.3f} s",
                _share(part.seconds, record.total_s),
            )
            for part in parts(record)
        ],
    )
    print_lines(_details(record))


def _details(record: RequestRecord) -> list[str]:
    tokens, lookup, plan = record.tokens, record.lookup, record.plan
    sources = [
        f"{number:,} {name}" for name in _SOURCES if (number := getattr(tokens, f"num_{name}"))
    ]
    found = [f"tokens: {', '.join(sources) or 'none'}"]
    if lookup is not None:
        held = [
            f"{pages:,} in {name}"
            for name in ("nvme", "object", "peer")
            if (pages := getattr(lookup, f"num_{name}_pages"))
        ]
        times = f", the last of {lookup.num_lookups}" if lookup.num_lookups > 1 else ""
        found.append(
            f"lookup at {lookup.at_s:.3f} s ({lookup.lookup_s * 1e3:.2f} ms{times}): "
            f"{lookup.num_memory_tokens:,} tokens in memory; pages: {', '.join(held) or 'none'}"
        )
    if plan is not None:
        found.append(
            f"plan at {plan.at_s:.3f} s: {plan.decision}; expected: load {seconds(plan.load_s)} s, "
            f"computing all {seconds(plan.prefill_all_s)} s, the rest "
            f"{seconds(plan.prefill_rest_s)} s, queue {seconds(plan.queue_wait_s)} s"
        )
    for tier in () if record.load is None else record.load.tiers:
        found.append(
            f"{tier.tier}: {tier.num_bytes:,} bytes in {_reads(tier.num_reads)} from "
            f"{tier.at_s:.3f} s on, {tier.read_s:.3f} s (expected {tier.expected_s:.3f}), checked "
            f"in {tier.verify_s:.3f} s of threads"
        )
    if record.copy is not None:
        took = "" if record.copy.copy_s is None else f", done within {record.copy.copy_s:.3f} s"
        found.append(
            f"copy to the device at {record.copy.at_s:.3f} s: {record.copy.num_tokens:,} tokens"
            + took
        )
    return found


def _reads(number: int) -> str:
    return "1 read" if number == 1 else f"{number:,} reads"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _moment(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "an unknown time"
