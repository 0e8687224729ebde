"""What replicas hold of a prompt, memory by memory, in prefix order."""

from __future__ import annotations

from sglang_tiered.policy.routing import Held
from sglang_tiered.route.replicas import DEVICE, DISK, EXTERNAL, HOST, HeldPages, Shared

KEYS = [11, 22, 33, 44, 55, 66]


def pages_of(*stored: tuple[int, list[int]]) -> HeldPages:
    made = HeldPages()
    for media, keys in stored:
        made.store(media, keys)
    return made


def test_each_memory_counts_what_lies_beyond() -> None:
    pages = pages_of((DEVICE, KEYS[:1]), (HOST, KEYS[:3]), (DISK, KEYS[:4]))
    assert pages.held(KEYS, 10) == Held(device=10, host=20, nvme=10)
    gap = pages_of((DEVICE, [KEYS[0], KEYS[2]]), (DISK, KEYS[3:]))
    assert gap.held(KEYS, 1) == Held(device=1), "it ends the prefix"


def test_peers_then_bucket_lie_beyond_the_own() -> None:
    one = pages_of((DEVICE, KEYS[:1]))
    all_of_them = [one, pages_of((DISK, KEYS[:3])), pages_of((EXTERNAL, KEYS[:5])), HeldPages()]
    shared = Shared(KEYS, all_of_them)
    assert (shared.end(0, DISK), shared.end(3, EXTERNAL), shared.end(5, EXTERNAL)) == (3, 5, 5)
    both = one.held(KEYS, 1, shared, has_peers=True, has_bucket=True)
    assert both == Held(device=1, peer=2, object=2)
    assert one.held(KEYS, 1, shared, has_peers=True) == Held(device=1, peer=2)
    assert one.held(KEYS, 1, shared, has_bucket=True) == Held(device=1, object=4)
    nothing = all_of_them[-1].held(KEYS, 1, shared, has_peers=True, has_bucket=True)
    assert nothing == Held(peer=3, object=2)


def test_removed_from_one_memory_stays_in_another() -> None:
    pages = pages_of((DEVICE, KEYS), (DISK, KEYS))
    pages.remove(DEVICE, KEYS)
    assert pages.held(KEYS, 1) == Held(nvme=6)
    pages.remove(DISK, KEYS)
    assert len(pages) == 0


def test_forgotten_memory_leaves_disks() -> None:
    pages = pages_of((DEVICE | HOST, KEYS), (DISK, KEYS[:2]))
    pages.forget(DEVICE | HOST)
    assert pages.held(KEYS, 1) == Held(nvme=2)
    pages.forget()
    assert pages.held(KEYS, 1) == Held()


def test_expected_pages_count_until_the_last_settles() -> None:
    pages = HeldPages()
    pages.expect(KEYS)
    pages.expect(KEYS[:2])
    assert pages.held(KEYS, 1) == Held(device=6)
    pages.settle(KEYS)
    assert pages.held(KEYS, 1) == Held(device=2)
    pages.settle(KEYS[:2])
    assert pages.held(KEYS, 1) == Held() and not pages._soon
