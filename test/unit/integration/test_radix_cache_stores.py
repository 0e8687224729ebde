"""What the radix cache queues for storage, over a tree of plain tuples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_tiered.integration.radix_cache import TieredRadixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 64
LONG = 4096


class Gate:
    """Notes what it is told; wants the chains that are long, and of them what was dropped."""

    def __init__(self, dropped: set[str]) -> None:
        self.dropped = dropped
        self.announced: list[tuple[str, int, int]] = []

    def announce(self, hashes: Sequence[str], *, num_tokens: int, prefix_tokens: int) -> None:
        self.announced.append((hashes[0], num_tokens, prefix_tokens))

    def wants_ancestors(self, chain_tokens: int) -> bool:
        return chain_tokens >= LONG

    def offer_again(self, hashes: Sequence[str], *, prefix_tokens: int) -> bool:
        return hashes[0] in self.dropped


class Tree:
    """One chain of nodes, numbered from 1; ``ends`` are their path ends in tokens."""

    def __init__(self, ends: Sequence[int], backed_up: bool = True) -> None:
        self.spans = list(zip([0, *ends], ends, strict=False))
        self.backed_up = backed_up

    def is_backuped(self, node_id: int) -> bool:
        return self.backed_up

    def collect_path_info(
        self, node_ids: Sequence[int]
    ) -> tuple[tuple[TreePathNodeInfo, ...], ...]:
        path = [
            TreePathNodeInfo(number, number - 1, start, end, None, 1)
            for number, (start, end) in enumerate(self.spans, start=1)
        ]
        return tuple(tuple(path[:node_id]) for node_id in node_ids)

    def get_hash_values(self, node_id: int) -> list[str]:
        return [f"node {node_id}"]


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    nodes: list[int] = []

    def write_backup_storage(self: object, node_id: int) -> None:
        nodes.append(node_id)

    monkeypatch.setattr(UnifiedRadixCache, "write_backup_storage", write_backup_storage)
    return nodes


def make_cache(
    monkeypatch: pytest.MonkeyPatch, tree: Tree, gate: Gate | None, num_ranks: int = 1
) -> TieredRadixCache:
    storage = None if gate is None else SimpleNamespace(gate=gate)
    monkeypatch.setattr(TieredRadixCache, "storage", storage)
    cache = TieredRadixCache.__new__(TieredRadixCache)
    cache.tree_core = tree
    cache.tp_world_size, cache.pp_size = num_ranks, 1
    return cache


def test_store_is_announced_with_its_tokens_and_its_chain(
    monkeypatch: pytest.MonkeyPatch, queued: list[int]
) -> None:
    gate = Gate(dropped={"node 1"})
    cache = make_cache(monkeypatch, Tree([2 * PAGE, 5 * PAGE]), gate)
    cache.write_backup_storage(2)
    assert gate.announced == [("node 2", 3 * PAGE, 5 * PAGE)]
    assert queued == [2]


def test_dropped_ancestors_of_a_chain_that_became_long_go_first(
    monkeypatch: pytest.MonkeyPatch, queued: list[int]
) -> None:
    gate = Gate(dropped={"node 1", "node 3", "node 4"})
    cache = make_cache(monkeypatch, Tree([1024, 2048, 3072, LONG]), gate)
    cache.write_backup_storage(4)
    assert queued == [1, 3, 4]
    assert gate.announced == [
        ("node 1", 1024, LONG),
        ("node 3", 1024, LONG),
        ("node 4", 1024, LONG),
    ]


def test_rank_that_does_not_decide_alone_queues_what_all_ranks_queue(
    monkeypatch: pytest.MonkeyPatch, queued: list[int]
) -> None:
    gate = Gate(dropped={"node 1"})
    cache = make_cache(monkeypatch, Tree([1024, LONG]), gate, num_ranks=2)
    cache.write_backup_storage(2)
    assert queued == [2]


@pytest.mark.parametrize("backed_up", [True, False])
def test_without_storage_or_host_copy_nothing_is_announced(
    monkeypatch: pytest.MonkeyPatch, queued: list[int], backed_up: bool
) -> None:
    gate = None if backed_up else Gate(set())
    cache = make_cache(monkeypatch, Tree([PAGE], backed_up), gate)
    cache.write_backup_storage(1)
    assert queued == [1]  # SGLang decides what becomes of it
    assert gate is None or gate.announced == []
