"""``ServerCosts``: what a server says of its prices and its load, and the cost model made of it.

``GET /tier/costs`` answers it as JSON. From one record (one scheduler, or data-parallel replica)
a router makes the ``CostModel`` with which that scheduler plans, so both come to the same plan for
the same prefix. Rounding in the last digit is the only difference. Plain values: what is learnt
goes on in the server alone.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_tiered.policy.cost_model import CostModel, PrefillCost, TransferCost

VERSION = 1

COSTS_CALL, SWITCH_CALL = "GET /tier/costs", "POST /pd_role_switch"
"""Those that take a key of their own."""

FRESH_S = 2.5
"""For so long a router counts on what a server said last."""

NOT_IDLE = "instance is not idle"
"""Begins SGLang's refusal to switch the role of a server with requests, and ours for what is not
stored yet."""
IN_PROGRESS = "another role switch is already in progress"

ABANDONED = "x-sglang-tiered-abandoned"
"""With which who asks a prefill server for its costs names the rooms of requests that no decode
server will ask it for: numbers, with commas between them."""

TIERS = ("nvme", "peer", "object")
"""The names of the tiers that loads come from, in the order in which the cost model numbers
them."""

ROLES = ("aggregated", "prefill", "decode")

_ORDER = re.compile(r"(prefill|decode)\.([0-9]{1,12})\.[0-9a-f]{64}")

# Bounded, so that no sum or product of them overflows: one server's record must not keep a router
# from choosing among the others.
Price = Annotated[float, Meta(ge=0, le=1e6)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Rank = Annotated[int, Meta(ge=0, lt=1024)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Moment = Annotated[float, Meta(ge=0, le=1e30)]
Text = Annotated[str, Meta(max_length=512)]
Port = Annotated[int, Meta(gt=0, lt=1 << 16)]


class PrefillPrices(msgspec.Struct, frozen=True):
    """Seconds per batch, per new token, per pair of a new token and one it attends to, and per
    token copied from host memory to the device. Learnt from ``observed`` batches (0: a prior)."""

    prices: tuple[Price, Price, Price, Price]
    observed: Count

    def __post_init__(self) -> None:
        _refuse_free(self.prices)


class TierPrices(msgspec.Struct, frozen=True):
    """Seconds per load and per byte, learnt from ``observed`` loads (0: a prior). ``healthy``:
    whether loads are served now; false also where there is no such tier. Bytes are physical ones,
    but ``stored_bytes``, those of its pages; None where there is no tier or no such figure."""

    prices: tuple[Price, Price]
    observed: Count
    healthy: bool
    held_bytes: Count | None = None
    capacity_bytes: Count | None = None
    stored_bytes: Count | None = None

    def __post_init__(self) -> None:
        _refuse_free(self.prices)


class Waiting(msgspec.Struct, frozen=True):
    """Requests in the queue, and the prompt tokens that they are expected to compute."""

    requests: Count
    tokens: Count


class DecodeLoad(msgspec.Struct, frozen=True):
    """The running batch. ``tokens`` are those of memory that it takes, with what a decode server
    keeps free for each of its requests; None of one that does not tell. ``moments`` are SGLang's
    sums over decode steps since the start: 1, b, t, b*b, b*t, g with batch size b, microseconds t
    and tokens g. The differences of two records give the regression of a step's time on its batch.
    """

    requests: Count
    max_requests: Count
    moments: tuple[Moment, Moment, Moment, Moment, Moment, Moment]
    tokens: Count | None = None


class Room(msgspec.Struct, frozen=True):
    """Tokens whose KV a memory holds, and could hold. Of the device only what requests use counts
    as held: the rest of its cache gives way."""

    held_tokens: Count
    capacity_tokens: Count


class RankCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one scheduler: the first rank of a data-parallel replica."""

    v: int = VERSION
    at: float
    """Unix time of the snapshot, by the server's clock."""

    age_s: Seconds = 0.0
    """Seconds from the snapshot to the answer. It grows while the scheduler computes, and for as
    long as it hangs; an idle one takes a snapshot every second."""

    boot: Annotated[str, Meta(pattern="^[0-9a-f]{0,64}$")]
    """Hex, drawn at each start of the server."""

    rank: Rank
    """The data-parallel replica, as ``routed_dp_rank`` of a request names it."""

    role: str
    """One of ``ROLES``."""

    bootstrap_port: int | None
    """Where decode finds this prefill server; None for other roles."""

    computes_on: Annotated[str, Meta(max_length=32)] = ""
    """SGLang's ``--device``: ``cuda`` or ``cpu``, for example. Empty of one that does not tell."""

    namespace: str
    """Hex. Pages are shared by servers with equal ones. Empty until the weights were read, and
    while the tiers are detached."""

    attached: bool = True
    """Whether the tiers are open, or opening; an operator may have detached them."""

    server: str
    """This scheduler's id among the servers that share pages, in hex; empty without any."""

    pages_at: Text = ""
    """Where it tells others which pages it holds on NVMe, ``tcp://HOST:PORT``, and serves them;
    empty where it shares none. A host that stands for all addresses is the server's own."""

    page_tokens: Annotated[int, Meta(gt=0, lt=1 << 53)]
    kv_bytes_per_token: Annotated[int, Meta(gt=0, lt=1 << 53)]
    """On this rank."""

    prefill: PrefillPrices
    tiers: dict[str, TierPrices]
    """By the names in ``TIERS``; all of them."""

    always_loads: bool
    """Whether all that is held is loaded, whatever it costs (``--tier-load always``)."""

    keyed: bool
    """Whether pages come from and go to servers with known keys only (``--tier-peer-keys``)."""

    queue_wait_s: Seconds
    """Expected time until the requests that wait are admitted, beside the batch that runs."""

    running_prefill_s: Seconds
    """What is expected to be left of the prefill that runs, later chunks included."""

    service_s: Seconds = 0.0
    """What a request adds to ``queue_wait_s``, on average; 0 before any."""

    num_others: Count = 0
    """Requests whose decodes or prefills run or who wait: a further prefill holds them up, and
    plans weigh that."""

    busy: Annotated[float, Meta(ge=0, le=1)]
    """Share of the last 10 seconds in which a prefill ran."""

    ahead_tokens: tuple[Count, Count, Count]
    """Tokens of loads under way, by the tiers of ``TIERS``: a further load comes behind them."""

    waiting: Waiting
    decode: DecodeLoad
    device: Room
    host: Room

    def __post_init__(self) -> None:
        if self.v != VERSION:
            raise ValueError(f"the record has version {self.v}, and only {VERSION} is known")
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is none of {', '.join(ROLES)}")
        if missing := [name for name in TIERS if name not in self.tiers]:
            raise ValueError(f"the prices of tier {missing[0]} are missing")

    @property
    def left_s(self) -> float:
        """What is left at the answer of the prefill that ran at the snapshot."""
        return max(0.0, self.running_prefill_s - self.age_s)

    def wait_s(self) -> float:
        """Return the seconds of prefill before that of a request which comes at the answer, if
        nothing else has come. Since the snapshot the scheduler has worked on the batch that ran,
        and no further: at its end it would have told, unless it hangs."""
        return self.queue_wait_s + self.left_s

    def cost_model(self) -> CostModel:
        """Return a cost model with these prices, which learns nothing. Records with equal prices
        share it, so that of servers that hold the same one is priced."""
        tiers = tuple(self.tiers[name].prices for name in TIERS)
        return _cost_model(self.page_tokens, self.kv_bytes_per_token, self.prefill.prices, tiers)


@functools.lru_cache(maxsize=1024)
def _cost_model(
    page_tokens: int,
    token_bytes: int,
    prefill: tuple[Price, ...],
    tiers: tuple[tuple[Price, ...], ...],
) -> CostModel:
    return CostModel(
        page_tokens=page_tokens,
        bytes_per_token=token_bytes,
        prefill=PrefillCost(prefill),
        transfers=[TransferCost(prices) for prices in tiers],
    )


class EventSource(msgspec.Struct, frozen=True):
    """Where SGLang publishes KV events over ZeroMQ: replica ``n`` at ``port + n``, and what it has
    published already at ``replay_port + n``. A host that stands for all addresses is the server's
    own."""

    host: Text
    port: Port
    topic: Text = ""
    replay_port: Port | None = None
    by_tenant: bool = False
    """Whether names of pages depend on the tenant (format ``dynamo``)."""


class ServerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``GET /tier/costs`` answers."""

    v: int = VERSION
    draining: bool
    """Whether the server takes no new requests, since it is about to end."""

    num_ranks: Annotated[int, Meta(gt=0)]
    """Data-parallel replicas of the server."""

    num_local_ranks: Annotated[int, Meta(gt=0)] | None = None
    """Those beside its HTTP endpoint, all that ever publish here; None of an earlier server."""

    ranks: tuple[RankCosts, ...]
    """Those that have published a record, by number. Of a server over several machines these are
    the ones beside its HTTP endpoint."""

    events: EventSource | None = None
    """None of a server that publishes none."""

    def __post_init__(self) -> None:
        if self.v != VERSION:
            raise ValueError(f"the answer has version {self.v}, and only {VERSION} is known")


def parse_server_costs(data: bytes) -> ServerCosts:
    """Parse the body of an answer. Raises ``ValueError`` with one sentence for anything else, other
    versions included; fields that are not known are ignored."""
    try:
        return msgspec.json.decode(data, type=ServerCosts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"this is no answer of /tier/costs: {error}") from error


def costs_key(operator_key: str) -> str:
    """Return the key that a server with this operator's key takes for ``GET /tier/costs``, and for
    nothing else."""
    return call_key(operator_key, COSTS_CALL)


@functools.cache
def call_key(operator_key: str, call: str) -> str:
    """Return the key for one call alone, or that of which those for its orders are made. Takes
    50 ms, once: who has it tries operator's keys no faster."""
    made = hashlib.scrypt(
        operator_key.encode("utf-8", "surrogateescape"),
        salt=f"sglang-tiered {call}".encode(),
        n=1 << 14,
        r=8,
        p=1,
        dklen=32,
    )
    return made.hex()


def switch_key(operator_key: str, boot: str, role: str, until_s: int) -> str:
    """Return the key for one order alone: until that Unix time a server with this operator's key
    and this boot takes it for ``POST /pd_role_switch`` to that role."""
    key, order = call_key(operator_key, SWITCH_CALL).encode(), f"{role}.{until_s}"
    return f"{order}.{hmac.digest(key, f'{boot}.{order}'.encode(), 'sha256').hex()}"


def order_of(key: str) -> tuple[str, int] | None:
    """Return the role that a ``switch_key`` orders and until when, as it says itself; None of any
    other key."""
    order = _ORDER.fullmatch(key)
    return None if order is None else (order[1], int(order[2]))


def _refuse_free(prices: tuple[float, ...]) -> None:
    if not any(prices):
        raise ValueError("all prices are zero")
