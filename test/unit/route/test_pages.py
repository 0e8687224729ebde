"""What servers hold of a prompt, memory by memory, in prefix order."""

from __future__ import annotations

from sglang_tiered.policy.routing import Held
from sglang_tiered.route.pages import DEVICE, DISK, EXTERNAL, HOST, HeldPages

KEYS = [11, 22, 33, 44, 55, 66]


def index_of(*stored: tuple[int, int, list[int]]) -> HeldPages:
    made = HeldPages()
    for server, medium, keys in stored:
        made.store(server, medium, keys)
    return made


def test_each_memory_counts_what_lies_beyond() -> None:
    index = index_of((0, DEVICE, KEYS[:1]), (0, HOST, KEYS[:3]), (0, DISK, KEYS[:4]))
    assert index.held(0, KEYS, 10) == Held(device=10, host=20, nvme=10)
    assert index.held(1, KEYS, 10) == Held()


def test_a_gap_ends_the_prefix() -> None:
    index = index_of((0, DEVICE, [KEYS[0], KEYS[2]]), (0, DISK, KEYS[3:]))
    assert index.held(0, KEYS, 1) == Held(device=1)


def test_peers_then_bucket_lie_beyond_the_own() -> None:
    index = index_of((0, DEVICE, KEYS[:1]), (1, DISK, KEYS[:3]), (2, EXTERNAL, KEYS[:5]))
    shared = index.shared([0, 1, 2], KEYS)
    assert (shared.end(0, DISK), shared.end(3, EXTERNAL), shared.end(5, EXTERNAL)) == (3, 5, 5)
    both = index.held(0, KEYS, 1, shared, has_peers=True, has_bucket=True)
    assert both == Held(device=1, peer=2, object=2)
    assert index.held(0, KEYS, 1, shared, has_peers=True) == Held(device=1, peer=2)
    assert index.held(0, KEYS, 1, shared, has_bucket=True) == Held(device=1, object=4)
    assert index.held(3, KEYS, 1, shared, has_peers=True, has_bucket=True) == Held(peer=3, object=2)


def test_removed_from_one_memory_stays_in_another() -> None:
    index = index_of((0, DEVICE, KEYS), (0, DISK, KEYS))
    index.remove(0, DEVICE, KEYS)
    assert index.held(0, KEYS, 1) == Held(nvme=6)
    index.remove(0, DISK, KEYS)
    assert index.num_pages(0) == 0


def test_forgotten_memory_leaves_disks() -> None:
    index = index_of((0, DEVICE | HOST, KEYS), (0, DISK, KEYS[:2]), (1, HOST, KEYS))
    index.forget(0, DEVICE | HOST)
    assert index.held(0, KEYS, 1) == Held(nvme=2)
    assert index.held(1, KEYS, 1) == Held(host=6)
    index.forget(0)
    assert index.held(0, KEYS, 1) == Held()


def test_expected_pages_count_until_the_last_settles() -> None:
    index = HeldPages()
    index.expect(0, KEYS)
    index.expect(0, KEYS[:2])
    assert index.held(0, KEYS, 1) == Held(device=6)
    index.settle(0, KEYS)
    assert index.held(0, KEYS, 1) == Held(device=2)
    index.settle(0, KEYS[:2])
    assert index.held(0, KEYS, 1) == Held() and not index._soon[0]


def test_heir_of_a_server_inherits_no_pages() -> None:
    index = HeldPages()
    index.expect(0, [1, 2])
    assert index.own(0, [1, 2]) == (2, 2, 2)
    index.drop(0)
    assert index.own(0, [1, 2]) == (0, 0, 0)
    index.expect(0, [1])
    index.settle(0, [2])  # of the request that died
    assert index.own(0, [1, 2]) == (1, 1, 1)
