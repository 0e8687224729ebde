"""Users of a life: each asks one thing after the other, as conversations that grow, come back and
branch, gives some of it up, and compares with what stock answers."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from world import DEADLINE_S, World

if TYPE_CHECKING:
    from prefill_decode import Reply
    from server_process import Server

TENANTS: tuple[dict[str, Any], ...] = (
    {"extra_key": "acme", "cache_salt": "s3cret"},
    {"extra_key": "other"},
)
MAX_TOKENS, MAX_CONVERSATIONS = 2600, 40
ABORT_SHARE, MAX_ABORT_S = 0.15, 1.2
LOOK_S = 0.1
TIE = 2e-3
"""Of log probabilities; rounding of float32 moves them by a hundredth of it."""


class Violation(AssertionError):
    """Something that must never be."""


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    tenant: int

    @property
    def body(self) -> dict[str, Any]:
        return {"input_ids": self.tokens, **TENANTS[self.tenant]}


@dataclass
class Life:
    """Of the servers of one setup: what its clients and its operator share."""

    world: World
    stock: Server
    counts: Counter[str]
    held: list[Prompt] = field(default_factory=list)
    asked: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)  # tenants, first pages
    ends: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    _num_disturbing: int = 0
    _disturbed_at: float = 0.0
    _is_open: bool = True
    _num_active: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def disturbance(self) -> Iterator[None]:
        """Requests may fail that are under way meanwhile."""
        self._num_disturbing += 1
        try:
            yield
        finally:
            self._num_disturbing -= 1
            self._disturbed_at = time.monotonic()

    def was_disturbed(self, since: float) -> bool:
        return bool(self._num_disturbing) or self._disturbed_at >= since

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_open, 2 * DEADLINE_S), "never let in"
            self._num_active += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_active -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self, *, waits: bool) -> Iterator[None]:
        """No request begins, and where it waits none is under way."""
        with self._changed:
            self._is_open = False
            ended = not waits or self._changed.wait_for(lambda: not self._num_active, DEADLINE_S)
            assert ended, f"{self._num_active} requests do not end"
        try:
            yield
        finally:
            with self._changed:
                self._is_open = True
                self._changed.notify_all()

    def until(self, trouble: Callable[[], Any], what: str) -> None:
        """Until there is no trouble."""
        deadline = time.monotonic() + DEADLINE_S
        while found := trouble():
            if time.monotonic() >= deadline:
                raise Violation(f"{found} {what} after {DEADLINE_S:.0f} s")
            time.sleep(LOOK_S)

    def any_held(self, source: random.Random) -> Prompt | None:
        return source.choice(self.held) if self.held else None

    def is_right(self, prompt: list[int], got: list[int]) -> bool:
        """Whether tokens are what stock answers. Where its two best tokens are closer than
        rounding either is right, and what follows cannot be compared."""
        expected = self.stock.generate(prompt, max(1, len(got))).output_ids
        pairs = enumerate(zip(got, expected, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is None:
            return True
        body: dict[str, Any] = {
            "input_ids": [*prompt, *expected[:first]],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answer = self.stock.request("/generate", body)
        (best, one, _), (next_best, two, _) = answer["meta_info"]["output_top_logprobs"][0]
        return got[first] in (one, two) and best - next_best < TIE


class Client(threading.Thread):
    """Asks until the round ends."""

    def __init__(self, life: Life, seed: str) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self._life, self._source = life, random.Random(seed)

    def run(self) -> None:
        life, source = self._life, self._source
        try:
            while not life.ends.is_set():
                gives_up = source.random() < ABORT_SHARE
                delay_s = MAX_ABORT_S * source.random() ** 2 if gives_up else None
                ask(life, source, draw(life, source), abort_after_s=delay_s)
        except BaseException as error:  # the round raises it again
            life.errors.append(error)
            life.ends.set()


def draw(life: Life, source: random.Random) -> Prompt:
    """The next turn: new, or of a conversation that was held. The other tenant may say the same,
    and must find nothing of it."""

    def words(number: int) -> list[int]:
        return [source.randrange(32, 127) for _ in range(number)]

    held = life.any_held(source)
    kind = source.choices(["new", "grow", "return", "branch", "borrow"], [3, 6, 5, 2, 1])[0]
    if held is None or kind == "new":
        length = source.choice([3, 64, 65, 300, 700, 1500])
        return Prompt(words(length), source.randrange(len(TENANTS)))
    if kind == "grow":
        return Prompt([*held.tokens, *words(source.randint(1, 300))], held.tenant)
    if kind == "branch":
        stem = held.tokens[: source.randint(1, len(held.tokens))]
        return Prompt([*stem, *words(source.randint(1, 200))], held.tenant)
    return Prompt(held.tokens, 1 - held.tenant) if kind == "borrow" else held


def ask(
    life: Life, source: random.Random, prompt: Prompt, *, abort_after_s: float | None = None
) -> None:
    """One turn, compared with stock; given up after a time, if there is one."""
    world, num_new = life.world, source.choice([1, 8, 8, 24])
    rid, role = f"soak-{source.getrandbits(64):016x}", source.choice(sorted(world.servers))
    timer = None
    if abort_after_s is not None:
        arguments = (role, "/abort_request", {"rid": rid})
        timer = threading.Timer(abort_after_s, world.ask, arguments)
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    with life.request():
        began, page = time.monotonic(), (prompt.tenant, tuple(prompt.tokens[: world.setup.page]))
        was_asked = page in life.asked
        life.asked.add(page)
        if timer is not None:
            timer.start()
        if world.pair is not None:
            extra = {"rid": rid, **TENANTS[prompt.tenant]}
            reply = world.pair.generate(prompt.tokens, num_new, **extra)
        else:
            body = {**prompt.body, "rid": rid, "sampling_params": sampling}
            reply = world.ask(role, "/generate", body)
        if timer is not None:
            timer.cancel()
    may_fail = abort_after_s is not None or life.was_disturbed(began)
    if problem := _problem(life, prompt, num_new, reply, was_asked=was_asked, may_fail=may_fail):
        raise Violation(f"{rid}, {len(prompt.tokens)} tokens, on {role}: {problem}\n{reply}")


def _problem(
    life: Life, prompt: Prompt, num_new: int, reply: Reply, *, was_asked: bool, may_fail: bool
) -> str:
    life.counts[f"requests answered {reply.status}"] += 1
    if reply.status != 200:
        return "" if may_fail else "it failed for no reason"
    got, meta = reply.output_ids, reply.body["meta_info"]
    if not life.is_right(prompt.tokens, got):
        return "another answer than stock's"
    found = meta.get("cached_tokens_details") or {}
    for tier in ("device", "host", "storage"):
        life.counts[f"tokens from {tier}"] += found.get(tier) or 0
    if meta.get("cached_tokens") and not was_asked:
        return "it found what its tenant never asked"
    if len(got) < num_new:
        return "" if may_fail else "it ended early"
    whole = Prompt([*prompt.tokens, *got], prompt.tenant)
    if len(whole.tokens) <= MAX_TOKENS:
        life.held.append(whole)
        del life.held[:-MAX_CONVERSATIONS]
    return ""
