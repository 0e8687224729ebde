"""Users of a life: each asks one thing after the other, gives some of it up, and compares."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

from conversations import TENANTS, Prompt
from life import Life, Violation

if TYPE_CHECKING:
    from prefill_decode import Reply

__all__ = ["Client", "ask"]

ABORT_SHARE = 0.15
MAX_ABORT_S = 1.2


class Client(threading.Thread):
    """Asks until the round ends."""

    def __init__(self, life: Life, seed: str) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self._life, self._source = life, random.Random(seed)

    def run(self) -> None:
        try:
            while not self._life.ends.is_set():
                prompt = self._life.conversations.draw(self._source)
                delay_s = None
                if self._source.random() < ABORT_SHARE:
                    delay_s = MAX_ABORT_S * self._source.random() ** 2
                ask(self._life, self._source, prompt, abort_after_s=delay_s)
        except BaseException as error:  # the round raises it again
            self._life.fail(error)


def ask(
    life: Life, source: random.Random, prompt: Prompt, *, abort_after_s: float | None = None
) -> Reply:
    """One turn, compared with stock; given up after a time, if there is one."""
    num_new = source.choice([1, 8, 8, 24])
    rid = f"soak-{source.getrandbits(64):016x}"
    leaves = abort_after_s is not None and life.world.pair is None and source.random() < 0.4
    extra: dict[str, Any] = {"rid": rid, **TENANTS[prompt.tenant]}
    role, timer = source.choice(sorted(life.world.servers)), None
    if leaves:
        extra["patience_s"] = abort_after_s
    elif abort_after_s is not None:
        arguments = (role, "/abort_request", {"rid": rid})
        timer = threading.Timer(abort_after_s, life.world.ask, arguments)
    with life.traffic.request():
        before, erasures = life.weights, life.asked.num_erasures[prompt.tenant]
        updates, mixing, began = life.num_updates, life.num_mixing, time.monotonic()
        number = life.asked.begin(prompt.tenant, prompt.tokens)
        if timer is not None:
            timer.start()
        reply = life.world.generate(role, prompt.tokens, num_new, **extra)
        if timer is not None:
            timer.cancel()
    changed = updates != life.num_updates or updates % 2
    weights = set(life.models) if changed else {before}
    may_fail = abort_after_s is not None or life.was_disturbed(began)
    got, problem = judge(
        life, prompt, num_new, weights, reply, may_fail=may_fail, mixes=mixing != life.num_mixing
    )
    found = found_tokens(reply)
    most = life.asked.most(number, weights, prompt.tokens)
    life.asked.end(number, weights, [*prompt.tokens, *got])
    kind = f"{prompt.kind} of {len(prompt.tokens)} tokens for tenant {prompt.tenant}"
    if sum(found.values()) > most and erasures == life.asked.num_erasures[prompt.tenant]:
        problem = problem or f"found {found}, of which only {most} tokens were ever asked"
    if problem is not None:
        raise Violation(f"{kind}, {rid} on {role}, took {reply.seconds:.2f} s: {problem}")
    if len(got) == num_new:
        life.conversations.answered(source, prompt, got)
    return reply


def judge(
    life: Life,
    prompt: Prompt,
    num_new: int,
    weights: set[str],
    reply: Reply,
    *,
    may_fail: bool,
    mixes: bool,
) -> tuple[list[int], str | None]:
    """The tokens that came, and what is wrong with them. Where it ``mixes``, the request may have
    gone on with other weights."""
    record = life.record
    if reply.status != 200:
        record.count("requests", "failed" if may_fail else "failed for no reason")
        return [], None if may_fail else f"status {reply.status}: {reply.error}"
    got: list[int] = reply.body["output_ids"]
    meta = reply.body["meta_info"]
    if not any(life.answers.is_right(one, prompt.tokens, num_new, got) for one in weights) and not (
        mixes and life.answers.is_mixture(prompt.tokens, num_new, got)
    ):
        expected = {one: life.answers.expected(one, prompt.tokens, num_new) for one in weights}
        return got, f"answered {got}, expected {expected}; {meta}"
    reason = meta.get("finish_reason") or {}
    if len(got) < num_new:
        record.count("requests", "aborted in decode" if got else "aborted before decode")
        return got, None if may_fail else f"ended early with {reason}"
    record.count("requests", prompt.kind)
    for tier, number in found_tokens(reply).items():
        record.count("tokens found", tier, number)
    record.count("tokens found", "none", len(prompt.tokens) - sum(found_tokens(reply).values()))
    return got, None


def found_tokens(reply: Reply) -> dict[str, int]:
    """Tokens of the prompt by where they were found."""
    meta: dict[str, Any] = reply.body.get("meta_info") or {}
    details = meta.get("cached_tokens_details") or {}
    found = {tier: details.get(tier) or 0 for tier in ("device", "host", "storage")}
    return found if any(found.values()) else {"device": meta.get("cached_tokens") or 0}
