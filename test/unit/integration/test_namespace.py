"""Everything that changes the meaning of KV bytes changes the namespace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_tiered.integration import namespace

IDENTITY: dict[str, Any] = {"model": "abc", "weight_version": "default", "tp": [0, 2]}


def make_pool(**changes: Any) -> SimpleNamespace:
    settings = {
        "dtype": torch.float16,
        "layout": "page_first",
        "page_size": 64,
        "layer_num": 32,
        "head_num": 8,
        "head_dim": 128,
    }
    return SimpleNamespace(**{**settings, **changes})


def digest(identity: dict[str, Any] = IDENTITY, **pool: Any) -> bytes:
    return namespace.digest(identity, {"kv": namespace.describe_pool(make_pool(**pool))})


def test_same_meaning_has_the_same_namespace() -> None:
    assert digest() == digest() and len(digest()) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"layout": "page_first_direct"},
        {"page_size": 32},
        {"layer_num": 33},
        {"head_num": 4},
        {"head_dim": 64},
        {"v_head_dim": 64},
        {"start_layer": 1},
        {"storage_format_tag": "packed"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_geometry_is_another_namespace(change: dict[str, Any]) -> None:
    assert digest(**change) != digest()


@pytest.mark.parametrize(
    "change", [{"model": "abd"}, {"weight_version": "v2"}, {"tp": [1, 2]}, {"tp": [0, 1]}]
)
def test_other_identity_is_another_namespace(change: dict[str, Any]) -> None:
    assert digest({**IDENTITY, **change}) != digest()


def test_second_pool_is_part_of_the_namespace() -> None:
    one = {"kv": namespace.describe_pool(make_pool())}
    two = {**one, "swa": namespace.describe_pool(make_pool(layer_num=4))}
    assert namespace.digest(IDENTITY, one) != namespace.digest(IDENTITY, two)


def test_weights_changed_in_place_never_return_to_a_namespace() -> None:
    start = digest()
    seen = {start, *(namespace.successor(start) for _ in range(10))}
    assert len(seen) == 11
