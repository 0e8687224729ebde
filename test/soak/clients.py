"""Users of a life: each asks one thing after the other, gives some of it up, and compares with what
stock answers."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conversations import TENANTS, Prompt
from life import Life, Violation
from world import DEADLINE_S

from server_process import Server

if TYPE_CHECKING:
    from prefill_decode import Reply

ABORT_SHARE = 0.15
MAX_ABORT_S = 1.2
TIE = 2e-3
"""Of log probabilities; rounding of float32 moves them by a hundredth of it."""
STOCK = ("--tier-mode", "off", "--max-total-tokens", "16384", "--sleep-on-idle")


class Answers:
    """What one stock server for each set of weights answers, asked once. Greedy decoding gives the
    same tokens whatever the batch, but for ties: where the two best tokens are closer than
    rounding, either is right, and what follows cannot be compared."""

    def __init__(self, models: dict[str, Path], folder: Path) -> None:
        self.servers = {
            name: Server.spawn(path, folder / f"stock-{name}.log", *STOCK)
            for name, path in models.items()
        }
        self._known: dict[tuple[str, str, int], list[int]] = {}
        self._lock = threading.Lock()

    def expected(self, weights: str, prompt: list[int], num_new: int) -> list[int]:
        key = (weights, str(prompt), num_new)
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = self.servers[weights].generate(prompt, num_new).output_ids
            with self._lock:
                self._known[key] = known
        return known

    def is_right(self, weights: str, prompt: list[int], num_new: int, got: list[int]) -> bool:
        """Whether tokens are what stock answers, or, of an answer that was cut off, begin so."""
        expected = self.expected(weights, prompt, num_new)
        differing = [i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b]
        if not differing:
            return len(got) <= len(expected)
        first = differing[0]
        body: dict[str, Any] = {
            "input_ids": [*prompt, *expected[:first]],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answer = self.servers[weights].request("/generate", body)
        (best, one, _), (next_best, two, _) = answer["meta_info"]["output_top_logprobs"][0]
        return got[first] in (one, two) and best - next_best < TIE


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
) -> None:
    """One turn, compared with stock; given up after a time, if there is one."""
    num_new = source.choice([1, 8, 8, 24])
    rid, role = f"soak-{source.getrandbits(64):016x}", source.choice(sorted(life.world.servers))
    patience_s, timer = DEADLINE_S, None
    if abort_after_s is not None and life.world.pair is None and source.random() < 0.4:
        patience_s = abort_after_s
    elif abort_after_s is not None:
        arguments = (role, "/abort_request", {"rid": rid})
        timer = threading.Timer(abort_after_s, life.world.ask, arguments)
    with life.traffic.request():
        before, erasures = life.weights, life.asked.num_erasures[prompt.tenant]
        updates, began = life.num_updates, time.monotonic()
        number = life.asked.begin(prompt.tenant, prompt.tokens)
        if timer is not None:
            timer.start()
        extra = {"rid": rid, **TENANTS[prompt.tenant]}
        reply = life.world.generate(role, prompt.tokens, num_new, patience_s, **extra)
        if timer is not None:
            timer.cancel()
    changed = updates != life.num_updates or updates % 2
    weights = set(life.models) if changed else {before}
    may_fail = abort_after_s is not None or life.was_disturbed(began)
    got, problem = judge(life, prompt, num_new, weights, reply, may_fail=may_fail)
    found = found_tokens(reply)
    most = life.asked.most(number, weights, prompt.tokens)
    life.asked.end(number, weights, [*prompt.tokens, *got])
    if sum(found.values()) > most and erasures == life.asked.num_erasures[prompt.tenant]:
        problem = problem or f"found {found}, of which only {most} tokens were ever asked"
    if problem is not None:
        kind = f"{prompt.kind} of {len(prompt.tokens)} tokens for tenant {prompt.tenant}"
        raise Violation(f"{kind}, {rid} on {role}, took {reply.seconds:.2f} s: {problem}")
    if len(got) == num_new:
        life.conversations.answered(source, prompt, got)


def judge(
    life: Life, prompt: Prompt, num_new: int, weights: set[str], reply: Reply, *, may_fail: bool
) -> tuple[list[int], str | None]:
    """The tokens that came, and what is wrong with them."""
    if reply.status != 200:
        life.record.count("requests", "failed" if may_fail else "failed for no reason")
        return [], None if may_fail else f"status {reply.status}: {reply.error}"
    got: list[int] = reply.body["output_ids"]
    meta = reply.body["meta_info"]
    if not any(life.answers.is_right(one, prompt.tokens, num_new, got) for one in weights):
        expected = {one: life.answers.expected(one, prompt.tokens, num_new) for one in weights}
        return got, f"answered {got}, expected {expected}; {meta}"
    if len(got) < num_new:
        life.record.count("requests", "aborted")
        return got, None if may_fail else f"ended early with {meta.get('finish_reason')}"
    life.record.count("requests", prompt.kind)
    for tier, number in found_tokens(reply).items():
        life.record.count("tokens found", tier, number)
    return got, None


def found_tokens(reply: Reply) -> dict[str, int]:
    """Tokens of the prompt by where they were found."""
    meta: dict[str, Any] = reply.body.get("meta_info") or {}
    details = meta.get("cached_tokens_details") or {}
    found = {tier: details.get(tier) or 0 for tier in ("device", "host", "storage")}
    return found if any(found.values()) else {"device": meta.get("cached_tokens") or 0}
