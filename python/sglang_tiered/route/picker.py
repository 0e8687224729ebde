"""``Picker``: one decision for one request. Of one event loop; waits for nothing.

Servers with prices are chosen among in seconds. Where one of them has none, all are compared by the
tokens of the prompts that each was sent and has not answered yet.
"""

from __future__ import annotations

import functools
import operator
import random
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sglang_tiered.policy.routing import (
    NOTHING_HELD,
    Held,
    RequestClass,
    choose_decode,
    choose_server,
    least_ttft,
    retry_after_s,
)
from sglang_tiered.policy.server_costs import ROLES
from sglang_tiered.route.envoy import DESTINATION, PREFILLER
from sglang_tiered.route.fleet import MAYBE_S
from sglang_tiered.route.prompt import MAX_NEW_TOKENS
from sglang_tiered.route.replicas import Shared

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from sglang_tiered.policy.routing import ServerState
    from sglang_tiered.route.fleet import Fleet, Member
    from sglang_tiered.route.prompt import Prompt
    from sglang_tiered.route.replicas import Replica


NUM_TARGETS = 3
RANK, ROOM = "x-override-routed-dp-rank", "x-override-bootstrap-room"
MAX_TRIED, MAX_ID = 4096, 128
"""Requests of which it is remembered where they were sent, and characters of their ids."""


@dataclass(slots=True)
class Refused:
    """``status`` 429 for what was shed, 503 where no server is ready."""

    status: int
    sentence: str
    retry_after_s: int
    klass: str


@dataclass(eq=False, slots=True)
class Picked:
    """``targets``: in the order in which they are to be tried. ``replica``: whose first token is
    awaited, of a pick by cost. ``predicted_s``: when it was expected, 0 where the prompt's length
    is guessed."""

    targets: list[Member]
    prompt: Prompt
    klass: RequestClass
    started_s: float
    replica: Replica | None = None
    predicted_s: float = 0.0
    held: Held = NOTHING_HELD
    prefill: Member | None = None
    more: dict[str, str] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    is_open: bool = True

    @property
    def by(self) -> str:
        """By what it was chosen."""
        return "least-tokens" if self.replica is None else "cost"

    @property
    def destination(self) -> str:
        """The header's value."""
        return ",".join(member.address for member in self.targets)

    def headers(self) -> dict[str, str]:
        """What the request is sent with."""
        told = {DESTINATION: self.destination, **self.more}
        if self.klass.priority is not None:
            told["x-override-priority"] = str(self.klass.priority)
        return told


def _ready(among: list[Member], role: str, tried: Collection[str], now: float) -> list[Member]:
    """Of a role those that a request was not sent to, or all where it was sent to each."""
    those = [one for one in among if one.role == role]
    # At overload all may be late with their costs; that is no reason to refuse.
    ready = [one for one in those if one.is_ready(now)] or [
        one for one in those if one.is_ready(now, MAYBE_S)
    ]
    return [one for one in ready if one.address not in tried] or ready


def _replicas(members: Iterable[Member]) -> dict[Replica, Member]:
    return {one: member for member in members for one in member.replicas.values()}


class Picker:
    """``draw`` returns random numbers from 0 to 1."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._fleet, self._clock, self._draw = fleet, clock, draw
        self._tried: OrderedDict[str, set[str]] = OrderedDict()

    def has_choice(self) -> bool:
        """Whether more than one replica could compute a prompt."""
        those = (one for one in self._fleet.members.values() if one.role != "decode")
        return sum(len(one.replicas) or 1 for one in those) > 1

    def pick(
        self,
        prompt: Prompt,
        klass: RequestClass,
        *,
        request: str = "",
        is_retry: bool = False,
        subset: Collection[str] = (),
        is_awaited: bool = True,
    ) -> Picked | Refused:
        """Choose for a request. ``request`` is its id: where it was sent is passed over at a retry.
        ``subset`` are the addresses to choose from, if any are given. Unless ``is_awaited``, nobody
        will say when it was answered."""
        now, request = self._clock(), request[:MAX_ID]
        among = [one for one in self._fleet.members.values() if not subset or one.address in subset]
        if not is_retry:  # an id that a client uses again
            self._tried.pop(request, None)
        tried = self._tried.get(request, set())
        whole, prefills, decodes = (_ready(among, role, tried, now) for role in ROLES)
        can_pair = bool(prefills and decodes)
        if not whole or (can_pair and (whole[0].address in tried or not whole[0].is_ready(now))):
            picked = self._pick_pair(prompt, klass, prefills, decodes, now)
        else:
            picked = self._pick_among(whole, prompt, klass, now)
        if isinstance(picked, Picked):
            self._sent(picked, request, is_awaited)
        return picked

    def _pick_pair(
        self,
        prompt: Prompt,
        klass: RequestClass,
        prefills: list[Member],
        decodes: list[Member],
        now: float,
    ) -> Picked | Refused:
        """Of servers with one half of the work each: who computes the prompt, and who answers."""
        if not (prefills and decodes):
            return Refused(503, "no server is ready", 1, klass.name)
        picked = self._pick_among(prefills, prompt, klass, now)
        if isinstance(picked, Refused):
            return picked
        picked.prefill = prefill = picked.targets[0]
        picked.targets = [self._decode_among(decodes, prompt, now)]
        room = secrets.randbits(62)
        if picked.replica is not None:
            # By the remainder SGLang finds the replica. What names one would reach both halves.
            room += picked.replica.record.rank - room % prefill.num_ranks
        picked.more = {
            PREFILLER: prefill.address,
            "x-override-bootstrap-host": urlsplit(prefill.url).hostname or "",
            "x-override-bootstrap-port": str(prefill.bootstrap_port),
            ROOM: str(room),
        }
        return picked

    def _decode_among(self, members: list[Member], prompt: Prompt, now: float) -> Member:
        """Where one tells no costs, any of them will do."""
        if not all(one.replicas for one in members):
            return min(members, key=lambda _: self._draw())
        replicas = _replicas(members)
        states = {one: one.state.decode for one in replicas}
        chosen = choose_decode(states, prompt.num_tokens, prompt.max_new, draw=self._draw)
        # Until the server tells more, an answer is short, whatever its client allows.
        states[chosen].reserve(now, prompt.num_tokens + min(prompt.max_new, MAX_NEW_TOKENS))
        return replicas[chosen]

    def _pick_among(
        self, ready: list[Member], prompt: Prompt, klass: RequestClass, now: float
    ) -> Picked | Refused:
        if not all(one.replicas for one in ready):
            order = sorted(ready, key=lambda one: (one.tokens_sent, self._draw()))
            return Picked(order[:NUM_TARGETS], prompt, klass, now)
        replicas = _replicas(ready)
        states = {one: one.state for one in replicas}
        held = self._held(states, prompt)
        refused = self._refusal(klass, states, held, prompt, now)
        if refused is not None:
            return refused
        soonest = sorted(states, key=lambda one: states[one].queue_s(now))
        replica, expected = choose_server(states, held, prompt.num_tokens, now, draw=self._draw)
        replica.state.reserve(now, expected.work_s)
        member = replicas[replica]
        targets = dict.fromkeys([member, *(replicas[one] for one in soonest)])
        picked = Picked(list(targets)[:NUM_TARGETS], prompt, klass, now, replica)
        if prompt.ids is not None:  # or else the length is guessed, and teaches nothing
            picked.predicted_s = expected.ttft_s
        picked.held, picked.keys = held[replica], prompt.keys(replica.record.page_tokens)
        if len(member.replicas) > 1:
            # Envoy may go on to another server of the list, which then takes its own replica.
            picked.targets = [member]
            picked.more[RANK] = str(replica.record.rank)
        return picked

    def _refusal(
        self,
        klass: RequestClass,
        states: Mapping[Replica, ServerState],
        held: Mapping[Replica, Held],
        prompt: Prompt,
        now: float,
    ) -> Refused | None:
        if klass.limit_s is None or not klass.is_sheddable:
            return None
        least_s = least_ttft(states, held, prompt.num_tokens, now)
        shortest_s = min(state.queue_s(now) for state in states.values())
        after_s = retry_after_s(klass.limit_s, least_s, shortest_s)
        if after_s is None:
            return None
        sentence = f"no server promises a first token within {klass.limit_s:g} s"
        return Refused(429, sentence, after_s, klass.name)

    def _held(self, replicas: Iterable[Replica], prompt: Prompt) -> dict[Replica, Held]:
        groups: dict[tuple[str, bool, int], Shared] = {}
        found = {}
        for replica in replicas:
            record = replica.record
            keys = prompt.keys(record.page_tokens)
            group = (record.namespace, record.keyed, record.page_tokens)
            if group not in groups:
                sources = self._fleet.sources_of(replica)
                mask = functools.reduce(operator.or_, (one.bit for one in sources), 0)
                bits = self._fleet.stored.bits(prompt.stored(record.page_tokens)) if mask else ()
                groups[group] = Shared(keys, [one.pages for one in sources], bits, mask)
            found[replica] = replica.pages.held(
                keys,
                record.page_tokens,
                groups[group],
                bit=replica.bit,
                has_peers=bool(record.server) and record.tiers["peer"].healthy,
                has_bucket=record.tiers["object"].healthy,
            )
        return found

    # ---- What becomes of it ----

    def _sent(self, picked: Picked, request: str, is_awaited: bool) -> None:
        if request:
            tried = self._tried.setdefault(request, set())
            tried.update(one.address for one in (picked.targets[0], picked.prefill) if one)
            while len(self._tried) > MAX_TRIED:
                self._tried.popitem(last=False)
        if not is_awaited:
            picked.is_open = False
            return
        self._first(picked).tokens_sent += picked.prompt.num_tokens
        if picked.replica is not None:
            picked.replica.pages.expect(picked.keys)

    def _first(self, picked: Picked) -> Member:
        return picked.prefill or picked.targets[0]

    def answered(self, picked: Picked, is_good: bool, served: str) -> None:
        """Learn from the head of an answer: it comes with the first token of the stream of a chat
        or completion. ``served``: who sent it, if that is known."""
        if picked.is_open:
            seen_s = self._clock() - picked.started_s
            is_as_picked = is_good and served in ("", picked.targets[0].address)
            replica = picked.replica
            if picked.prompt.is_stream and is_as_picked and replica is not None:
                replica.state.answered(picked.predicted_s, seen_s)
        self.ended(picked, is_good)

    def ended(self, picked: Picked, is_good: bool = False) -> None:
        """The request has its head, or never will. Idempotent."""
        if picked.is_open:
            picked.is_open = False
            if picked.prefill is not None and not is_good:
                self._fleet.abandon(picked.prefill, int(picked.more[ROOM]))
            self._first(picked).tokens_sent -= picked.prompt.num_tokens
            if picked.replica is not None:
                picked.replica.pages.settle(picked.keys)
