"""Where the time of a request went, and the one sentence that says why. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.flags import format_bytes

if TYPE_CHECKING:
    from sglang_tiered.request_log import RequestRecord, TierLoad


QUEUE, PREFILL, OTHERS, REST, GENERATE = "queue", "prefill", "prefills", "rest", "generate"
"""Parts of a request's time beside its waits, which are called by what was waited for."""

NAMES = {
    QUEUE: "waited in the queue",
    "ranks": "waited for the other ranks to agree on its load",
    "window": "waited for other loads to leave it room",
    "stores": "waited for stores to leave host memory",
    "copies": "waited for host copies of what comes before",
    "load": "waited for its load",
    "others": "waited for something else than its load",
    "back": "waited for its back while its front was computed",
    PREFILL: "computed its prompt",
    OTHERS: "waited for prefills of other requests before its first token",
    REST: "other work between its batches and its first token",
    GENERATE: "generated the rest",
}

_GIVEN_UP = {
    "late": "computing the rest was sooner by then",
    "deadline": "SGLang's deadline was over",
    "turn": "it gained nothing any more by its turn",
    "tier": "the tier stopped serving",
    "refused": "host memory was short",
    "no_host_path": "what comes before has no host copy",
    "revoked": "host memory was short",
}


class TimePart(NamedTuple):
    """A part of a request's time. Parts add up to its whole; ``at_s`` is when it began, as far as
    it is one time."""

    name: str
    seconds: float
    at_s: float


def parts(record: RequestRecord) -> list[TimePart]:
    """Return the parts of a request's time that are not nothing, in the order of their begin."""
    end_s = record.total_s
    admitted_s = end_s if record.admitted_s is None else record.admitted_s
    first_s = end_s if record.first_token_s is None else record.first_token_s
    found, waited_s, back_s = [], 0.0, 0.0
    for wait in record.waits:
        if wait.at_s >= admitted_s:
            back_s += wait.wait_s
        else:
            waited_s += wait.wait_s
        found.append(TimePart(wait.why, wait.wait_s, wait.at_s))
    found.append(TimePart(QUEUE, max(0.0, admitted_s - waited_s), 0.0))
    if record.admitted_s is not None:
        running_s = max(0.0, first_s - admitted_s - back_s)
        prefill = record.prefill
        prefill_s = 0.0 if prefill is None else min(prefill.prefill_s, running_s)
        found.append(TimePart(PREFILL, prefill_s, admitted_s))
        rest_s = running_s - prefill_s
        others_s = 0.0 if prefill is None else min(prefill.others_s, rest_s)
        found.append(TimePart(OTHERS, others_s, admitted_s + prefill_s))
        found.append(TimePart(REST, rest_s - others_s, admitted_s + prefill_s + others_s))
        found.append(TimePart(GENERATE, max(0.0, end_s - first_s), first_s))
    return sorted((part for part in found if part.seconds > 0), key=lambda part: part.at_s)


def cause(record: RequestRecord) -> str:
    """Return why a request took as long as it did: a sentence of its largest part."""
    by_name: dict[str, float] = {}
    for part in parts(record):
        by_name[part.name] = by_name.get(part.name, 0.0) + part.seconds
    if not by_name:
        return f"{seconds(record.total_s)} s: nothing took long."
    name = max(by_name, key=lambda name: by_name[name])
    said = f"{seconds(by_name[name])} of {seconds(record.total_s)} s: {_why(record, name)}"
    before = {one: took for one, took in by_name.items() if one != GENERATE}
    if name == GENERATE and before:
        first = max(before, key=lambda one: before[one])
        until = seconds(sum(before.values()))
        said += f"; before that {seconds(before[first])} of {until} s: {_why(record, first)}"
    if record.num_retractions:
        said += f"; gave its memory back {_count(record.num_retractions, 'time')} meanwhile"
    return f"{said}{_end(record)}."


def seconds(value: float) -> str:
    """Return seconds as people read them."""
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}" if value >= 0.001 else "0"


def _end(record: RequestRecord) -> str:
    if record.end != "abort":
        return ""
    return "; aborted before it ran" if record.admitted_s is None else "; aborted"


def _why(record: RequestRecord, name: str) -> str:
    if name == QUEUE:
        return NAMES[name] + _queue(record)
    if name in ("load", "back"):
        return _load(record, name)
    if name == PREFILL:
        return _prefill(record)
    if name == GENERATE:
        return f"generated {record.num_output_tokens:,} tokens"
    return NAMES[name] + ("" if name in (OTHERS, REST) else _given_up(record))


def _queue(record: RequestRecord) -> str:
    if record.num_ahead:
        return f" behind {_count(record.num_ahead, 'request')}"
    if record.num_running:
        return f" while {_count(record.num_running, 'request')} ran"
    return " for the batch before it"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _load(record: RequestRecord, name: str) -> str:
    tiers = () if record.load is None else record.load.tiers
    if not tiers:
        return "waited for its load, of which nothing was read" + _given_up(record)
    slowest = max(tiers, key=lambda tier: tier.read_s)
    said = f"{NAMES[name]}: " if name == "back" else ""
    return said + _reading(record, slowest) + _given_up(record)


def _reading(record: RequestRecord, tier: TierLoad) -> str:
    failed = _failed(tier)
    if not tier.num_bytes or tier.read_s <= 0:
        return f"waited for {tier.tier}, which gave nothing{failed}"
    said = f"read {format_bytes(tier.num_bytes)} from {tier.tier} at {_speed(tier, tier.read_s)}"
    if tier.expected_s > 0:
        said += f", planned at {_speed(tier, tier.expected_s)}"
    plan = record.plan
    if plan is not None and plan.num_tokens_ahead:
        said += f", behind {_count(plan.num_tokens_ahead, 'token')} of other loads"
    return said + failed


def _speed(tier: TierLoad, took_s: float) -> str:
    # A server writes no time below a microsecond, and a file may hold anything.
    return f"{format_bytes(int(tier.num_bytes / max(took_s, 1e-6)))}/s"


def _failed(tier: TierLoad) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tier.failed.items()))
    return f" (pages that failed: {reasons})" if reasons else ""


def _given_up(record: RequestRecord) -> str:
    given_up = record.given_up
    if given_up is None:
        return ""
    return f"; given up after {seconds(given_up.at_s)} s, as {_GIVEN_UP[given_up.why]}"


def _prefill(record: RequestRecord) -> str:
    said, plan, load = f"computed {_count(_computed(record), 'token')}", record.plan, record.load
    took_s = 0.0 if record.prefill is None else record.prefill.prefill_s
    failed = [] if load is None else [tier for tier in load.tiers if tier.failed]
    if record.given_up is not None:
        return said + _given_up(record)
    if failed:
        return f"{said}, as pages of {failed[0].tier} did not arrive{_failed(failed[0])}"
    if plan is None:
        return said
    if plan.decision == "declined":
        return (
            f"{said}; declined: loading was expected to take {seconds(plan.held_load_s)} s and "
            f"computing {seconds(plan.held_prefill_s)} s; computing took {seconds(took_s)} s"
        )
    if plan.decision == "truncated":
        num_planned = plan.num_nvme_tokens + plan.num_object_tokens + plan.num_peer_tokens
        return f"{said}, as no more than {num_planned:,} were expected to be sooner loaded"
    expected = plan.prefill_all_s if plan.decision == "absent" else plan.prefill_rest_s
    return f"{said}; absent: no tier held them; expected to take {seconds(expected)} s"


def _computed(record: RequestRecord) -> int:
    return record.tokens.num_computed or (record.prefill.num_tokens if record.prefill else 0)
