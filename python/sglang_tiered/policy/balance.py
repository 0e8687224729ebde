"""``RoleBalance``: which server of a pool of pairs changes its role, and when.

Loads are measured in servers. Prefill's is the time in which it computes; decode's the tokens that
it makes, over those of the largest batch that has room and steps in time. A split leaves as much
headroom as its scarcer role (``headroom_of``, the planner's rule). Both loads are of the same
requests: a role that is short of servers keeps work from the other, but does not change what each
needs of it. Decode's load trails by an answer's time: no server is given up for a load that moves.
So constant load, even too much of it, is not answered by a switch and its reverse, if answers take
no longer than loads are measured for. Where two splits are as good, requests that come by chance
can do it. So each switch back so soon doubles the time to the next one back.

Pure: records in, times of the caller's clock passed in. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.policy.routing import step_prices
from sglang_tiered.policy.server_costs import ROLES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sglang_tiered.policy.server_costs import RankCosts

    Prices = tuple[float, float]
    """Seconds of a decode step, and more of each request in it."""
    Seen = Mapping[str, Sequence[RankCosts]]


HALVES = ROLES[1:]
LOOK_S = 1.0
HOLDS = {
    "measuring": "servers were not in these roles for long enough, or an order failed or was taken "
    "back",
    "unmeasured": "a server tells no costs, or those of another one",
    "mixed": "servers compute on different kinds of devices",
    "floor": "a role would have less than its floor",
    "calm": "either role could serve twice its load",
    "balanced": "no split leaves a tenth more headroom",
    "slow": "decode seems to take longer than --balance-tpot for a step of one request",
    "trailing": "the load of decode still follows that of prefill",
    "loading": "prefill waits for loads from its tiers rather than for servers",
    "nobody": "no server of the role that would give one is asked any more",
    "switching": "a server drains, or changes its role",
}
"""Why there is no order, for people."""

GAIN = 1.1
"""How many times as much headroom is worth a switch: loads are not measured better than that."""
CALM = 2.0
LEVEL = 1.05
"""Decode's load moves where the halves of the time differ by more."""
WAIT_S = 1.0
HUNG_S = 10.0
"""Longer than it was expected to compute: an idle scheduler tells of itself every second, a busy
one before and after each batch."""
MAX_DOUBLED = 5
"""How often the time between orders doubles, while servers keep their roles or turn back."""
SOON = 8
"""A switch back so many times later is no reverse of the last: load turned."""
HISTORY = 0.02
"""Weight of all steps since the start, beside those of late: a batch that hardly varies does not
tell what one more request costs."""


def largest_batch(prices: Prices, num_fitting: float, tpot_s: float) -> float:
    """Return how many requests are decoded together at most: as memory has room for, and as a step
    carries in ``tpot_s``."""
    fixed_s, each_s = prices
    if fixed_s >= tpot_s:
        return 0.0
    return min(num_fitting, (tpot_s - fixed_s) / each_s if each_s > 0 else math.inf)


def decode_rate(prices: Prices, num_requests: float) -> float:
    """Return the tokens a second of so many requests."""
    fixed_s, each_s = prices
    return num_requests / (fixed_s + num_requests * each_s)


def headroom_of(have: tuple[float, float], loads: tuple[float, float]) -> float:
    """Return how often over prefill and decode could do what there is to do: the scarcer role."""
    return min(one / load if load > 0 else math.inf for one, load in zip(have, loads, strict=True))


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """``reason`` is for people."""

    server: str
    role: str
    reason: str


class _Look(NamedTuple):
    """Numbers of servers, and loads in servers. Of prefill also the mean wait, and the share of it
    with loads under way."""

    at_s: float
    num_prefill: float
    num_decode: float
    prefill: float
    decode: float
    wait_s: float
    loading: float


class RoleBalance:
    """Of one pool. At least ``cooldown_s`` pass from the end of an order to the next one, and over
    so long loads are measured. Each order in a row to one role that failed for now doubles the time
    to the next to that role. ``floor``: servers that each role keeps. ``tpot_s``: limit of a step.

    ``why`` is what the last look came to, one of ``HOLDS``; ``loads`` are those that were measured.
    ``headrooms`` are what the present split leaves of them, and the best: no numbers before."""

    def __init__(self, *, cooldown_s: float, floor: int, tpot_s: float) -> None:
        self._cooldown_s, self._floor, self._tpot_s = cooldown_s, floor, tpot_s
        self._looks: deque[_Look] = deque()
        self._moments: deque[tuple[float, Mapping[tuple[str, int], Sequence[float]]]] = deque()
        self._roles: dict[str, str] = {}
        self._refusals: Counter[str] = Counter()
        self._given_up: set[str] = set()
        self._failed: Counter[str] = Counter()  # orders in a row, by the role that was to be taken
        self._asked: RoleSwitch | None = None
        self._taken, self._taken_s, self._num_reversed = "", -math.inf, 0
        self._ended_s = -math.inf
        self.why = "measuring"
        self._forget()

    def _forget(self) -> None:
        self._looks.clear()
        self.loads = self.headrooms = (math.nan, math.nan)

    def look(
        self,
        now_s: float,
        servers: Seen,
        late: Collection[str] = frozenset(),
        *,
        is_switching: bool = False,
    ) -> RoleSwitch | None:
        """Decide by the records of all servers that take requests, as far as is known: those that
        are ``late`` may be dead, and keep no floor. The caller carries out what is returned, and
        says that it ``ended`` before the next look. ``is_switching``: a server is about it,
        whoever ordered that."""
        decided = self._decide(now_s, servers, late, is_switching=is_switching)
        if isinstance(decided, str):
            self.why = decided
            return None
        self.why = "switching"
        return decided

    def ended(self, switch: RoleSwitch, now_s: float, *, switched: bool, again: bool) -> None:
        """The order is over, and loads are measured anew. A server that did not switch is asked
        after all others, and without ``again`` never."""
        self._forget()
        self._ended_s, self._asked = now_s, switch
        self._refusals[switch.server] += not switched
        if switched:
            self._took(switch, now_s)
        elif again:
            self._failed[switch.role] = min(self._failed[switch.role] + 1, MAX_DOUBLED)
        if not again:
            self._given_up.add(switch.server)

    def _took(self, switch: RoleSwitch, now_s: float) -> None:
        """The server has the role."""
        self._asked = None
        self._failed[switch.role] = 0
        if self._taken not in ("", switch.role):
            is_soon = now_s - self._taken_s < SOON * self._cooldown_s * 2**self._num_reversed
            self._num_reversed = min(self._num_reversed + 1, MAX_DOUBLED) if is_soon else 0
        self._taken, self._taken_s = switch.role, now_s

    def _decide(
        self, now_s: float, servers: Seen, late: Collection[str], *, is_switching: bool
    ) -> RoleSwitch | str:
        # A scheduler that hangs behind HTTP that answers does no work.
        servers = {
            one: records
            for one, records in servers.items()
            if all(record.age_s <= HUNG_S + record.running_prefill_s for record in records)
        }
        roles = {one: records[0].role if records else "" for one, records in servers.items()}
        if (asked := self._asked) is not None and roles.get(asked.server) == asked.role:
            self._took(asked, now_s)  # its answer was lost
        pools = [[one for one, role in roles.items() if role == half] for half in HALVES]
        num_prefill, num_decode = map(len, pools)
        total = num_prefill + num_decode
        why = self._unfit(servers, total, is_switching=is_switching)
        if why or any(self._roles.get(one, role) != role for one, role in roles.items()):
            self._forget()
        self._roles = roles
        if why:
            return why

        prices = self._prices(now_s, servers)
        prefill, decode = ([servers[one] for one in pool] for pool in pools)
        self._measure(now_s, prefill, decode, prices)
        is_measured = (
            now_s - self._looks[0].at_s >= self._cooldown_s
            and len(self._looks) * LOOK_S >= self._cooldown_s / 2
            # One that is gone has left its load to others only since then.
            and all(one.num_prefill <= num_prefill for one in self._looks)
            and all(one.num_decode <= num_decode for one in self._looks)
        )
        if not is_measured:
            return "measuring"
        mean = _mean(self._looks)
        loads = self.loads = mean.prefill, mean.decode
        splits = {
            number: headroom_of((number, total - number), loads)
            for number in range(self._floor, total - self._floor + 1)
        }
        now = headroom_of((num_prefill, num_decode), loads)
        best = max(splits, key=lambda number: (splits[number], -abs(number - num_prefill)))
        self.headrooms = now, splits[best]
        giving = 0 if best < num_prefill else 1
        role, num_doubled = HALVES[1 - giving], 0
        if num_prefill in splits:  # or else a role is below its floor
            why = self._why_not(mean, prices, (best, total - best), giving)
            if why:
                return why
            num_doubled = self._num_reversed if role != self._taken else 0
        num_doubled = max(num_doubled, self._failed[role])
        if now_s < self._ended_s + self._cooldown_s * 2**num_doubled:
            return "measuring"

        left = [one for one in pools[giving] if one not in late]
        if len(left) <= self._floor:
            return "floor"
        left = [one for one in left if one not in self._given_up]
        if not left:
            return "nobody"
        return RoleSwitch(
            min(left, key=lambda one: (self._refusals[one], _work(servers[one]))),
            role,
            f"prefill has work for {loads[0]:.2f} of {num_prefill} servers, decode for "
            f"{loads[1]:.2f} of {num_decode}; {best} and {total - best} could do "
            f"{splits[best]:.2f} times as much, these {now:.2f}",
        )

    def _unfit(self, servers: Seen, total: int, *, is_switching: bool) -> str:
        """Return why loads of these servers cannot be compared now."""
        if is_switching:
            return "switching"
        if total < len(servers):
            return "unmeasured"
        if len({one.computes_on for records in servers.values() for one in records}) > 1:
            return "mixed"
        return "floor" if total < 2 * self._floor else ""

    def _why_not(self, mean: _Look, prices: Prices, best: tuple[int, int], giving: int) -> str:
        if self.headrooms[0] >= CALM:
            return "calm"
        if largest_batch(prices, math.inf, self._tpot_s) < 1:
            return "slow"
        last = self._looks[-1]
        middle_s = last.at_s - self._cooldown_s / 2
        first = _mean([one for one in self._looks if one.at_s <= middle_s])
        second = _mean([one for one in self._looks if one.at_s > middle_s])
        have = last.num_prefill, last.num_decode
        for one in (mean, first, second):
            loads = one.prefill, one.decode
            if headroom_of(best, loads) < GAIN * headroom_of(have, loads):
                return "balanced"
        before, after = (second, first) if giving == 0 else (first, second)
        if after.decode > LEVEL * before.decode:
            return "trailing"
        if giving == 0 and mean.wait_s > WAIT_S and mean.loading > 0.5:
            return "loading"
        return ""

    def _prices(self, now_s: float, servers: Seen) -> Prices:
        """Return those of the last ``cooldown_s``. Servers are taken to be alike: one that has just
        begun to decode has none of its own."""
        told = {
            (name, one.rank): one.decode.moments
            for name, records in servers.items()
            for one in records
        }
        self._moments.append((now_s, told))
        while len(self._moments) > 1 and self._moments[1][0] <= now_s - self._cooldown_s:
            self._moments.popleft()
        first = self._moments[0][1]
        lately = [
            [max(0.0, now - before) for before, now in zip(first[one], moments, strict=True)]
            for one, moments in told.items()
            if one in first
        ]
        sums = [sum(column) for column in zip([0.0] * 6, *lately, strict=True)]
        ever = [sum(column) for column in zip([0.0] * 6, *told.values(), strict=True)]
        part = HISTORY * sums[0] / ever[0] if sums[0] else 1.0
        fixed_s, each_s = step_prices(
            [now + part * before for now, before in zip(sums, ever, strict=True)]
        )
        if not fixed_s + each_s:  # no steps: memory decides
            return self._tpot_s / 2, 0.0
        return fixed_s, each_s

    def _measure(
        self,
        now_s: float,
        prefill: Sequence[Sequence[RankCosts]],
        decode: Sequence[Sequence[RankCosts]],
        prices: Prices,
    ) -> None:
        num_prefill = max(1, len(prefill))
        computes = waits = loads = 0.0
        for records in prefill:
            for one in records:
                computes += one.busy / len(records)
                waits += one.queue_wait_s / len(records) / num_prefill
                loads += any(one.ahead_tokens) / len(records) / num_prefill
        decodes = sum(
            _decode_load(one, prices, self._tpot_s) / len(records)
            for records in decode
            for one in records
        )
        self._looks.append(_Look(now_s, len(prefill), len(decode), computes, decodes, waits, loads))
        while len(self._looks) > 1 and self._looks[1].at_s <= now_s - self._cooldown_s:
            self._looks.popleft()


def _mean(looks: Collection[_Look]) -> _Look:
    return _Look(*(sum(column) / len(looks) for column in zip(*looks, strict=True)))


def _decode_load(record: RankCosts, prices: Prices, tpot_s: float) -> float:
    """Return the share of what a server could do that it does."""
    decode, room = record.decode, record.device
    if not decode.requests:
        return 0.0
    if largest_batch(prices, math.inf, tpot_s) < 1:
        return 1.0  # all that it can, and of how much nobody knows
    # Memory may also hold what waits for its prefill.
    tokens = decode.tokens or room.held_tokens
    fitting = decode.requests * room.capacity_tokens / max(1, tokens)
    most = largest_batch(prices, min(fitting, decode.max_requests), tpot_s)
    return decode_rate(prices, decode.requests) / decode_rate(prices, max(1.0, most))


def _work(records: Sequence[RankCosts]) -> tuple[float, int]:
    """What there is to do before the server is empty: prefills, and requests."""
    num_requests = sum(one.waiting.requests + one.decode.requests for one in records)
    return sum(one.wait_s() for one in records), num_requests
