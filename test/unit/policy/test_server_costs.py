"""What a server says of its costs makes the same plans elsewhere, and nothing else is believed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.cost_records import record_of
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.policy.server_costs import TIERS, RankCosts, ServerCosts, parse_server_costs
from sglang_tiered.storage.base import Tier

PAGE, BYTES = 64, 131_072

pages = st.integers(0, 400).map(lambda count: count * PAGE)
batches = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 60_000)), min_size=1, max_size=3),
        st.floats(1e-4, 20.0),
        st.integers(0, 5000),
    ),
    max_size=12,
)
loads = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 1 << 32), st.floats(1e-5, 60.0), st.integers(1, 9)),
    max_size=12,
)


def answer(*ranks: RankCosts) -> bytes:
    return msgspec.json.encode(ServerCosts(draining=False, num_ranks=1, ranks=ranks))


asked = st.fixed_dictionaries(
    {
        "num_new": st.integers(1, 5000),  # and what is held
        "num_before": st.integers(0, 20_000),
        "queue_wait_s": st.floats(0, 5),
        "ahead": st.tuples(*[st.integers(0, 50_000)] * 3),
        "num_others": st.integers(0, 50),
        "spans": st.lists(st.tuples(st.integers(0, 2), pages), max_size=4),
    }
)


@given(batches, loads, asked)
def test_router_plans_as_the_server_does(
    seen: list[tuple[list[tuple[int, int]], float, int]],
    read: list[tuple[int, int, float, int]],
    given: dict[str, Any],
) -> None:
    model = CostModel(
        page_tokens=PAGE,
        bytes_per_token=BYTES,
        prefill=PrefillCost((2e-3, 7e-5, 3e-9), token_bytes=BYTES),
    )
    for spans_of_batch, seconds, num_copied in seen:
        model.prefill.observe(spans_of_batch, seconds, num_copied)
    for tier, num_bytes, seconds, num_loads in read:
        model.transfers[tier].observe(num_bytes, seconds, num_loads)
    num_held = sum(num_tokens for _, num_tokens in given["spans"])
    (rank,) = parse_server_costs(answer(record_of(model))).ranks
    given = given | {"num_held": num_held, "num_new": num_held + given["num_new"]}
    own, routers = model.plan(**given), rank.cost_model().plan(**given)
    assert routers.parts == own.parts
    assert routers.load_s == pytest.approx(own.load_s, rel=1e-9)
    assert routers.saved_s == pytest.approx(own.saved_s, rel=1e-9, abs=1e-12)


def test_tiers_bear_the_names_and_numbers_of_loads() -> None:
    assert tuple(tier.value for tier in Tier) == TIERS


def test_a_later_servers_fields_are_ignored() -> None:
    data = msgspec.json.decode(answer(record_of(CostModel(page_tokens=PAGE, bytes_per_token=1))))
    data["ranks"][0]["new"] = data["new"] = 1
    assert parse_server_costs(msgspec.json.encode(data)).ranks[0].page_tokens == PAGE


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("v",), 2, "version 2, and only 1"),
        (("ranks", 0, "v"), 2, "version 2, and only 1"),
        (("ranks", 0, "tiers"), {}, "tier nvme are missing"),
        (("ranks", 0, "tiers", "peer", "prices"), [0, 0], "all prices are zero"),
        (("ranks", 0, "prefill", "prices"), [1, -1, 1, 1], ">= 0"),
        (("ranks", 0, "prefill", "prices"), [1, 1e308, 1, 1], "<= 1000000"),
        (("ranks", 0, "queue_wait_s"), 1e300, "<= 1000000000"),
        (("ranks", 0, "num_others"), 1 << 60, "<= "),
        (("ranks", 0, "decode", "moments"), [1, 1, 1, 1e308, 1, 1], "<= 1e"),
        (("ranks", 0, "kv_bytes_per_token"), 1 << 60, "<= "),
        (("ranks", 0, "page_tokens"), 0, ">= 1"),
    ],
)
def test_anything_else_is_one_sentence(path: tuple[Any, ...], value: Any, sentence: str) -> None:
    data = msgspec.json.decode(answer(record_of(CostModel(page_tokens=PAGE, bytes_per_token=1))))
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=f"this is no answer of /tier/costs: .*{sentence}"):
        parse_server_costs(msgspec.json.encode(data))


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"error": "later"}', b"\xff\xfe", b'{"x":' + b"[" * 10**5, b'{"v": NaN}'],
)
def test_bytes_of_another_kind_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="this is no answer of /tier/costs"):
        parse_server_costs(data)
