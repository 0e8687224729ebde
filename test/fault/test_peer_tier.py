"""Servers that share pages: stores, real sockets, processes that die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_peers import NAMESPACE
from peer_child import MiB, Sharer, SharerProcess, blank_run, sharer, stored_run
from peer_servers import quick

from kit.waiting import eventually
from sglang_tiered.errors import ConfigError
from sglang_tiered.sharing.addresses import Target
from sglang_tiered.sharing.peer_tier import PeerTier
from sglang_tiered.storage.base import Health, LookupResult, Reason, Run, Stop
from sglang_tiered.storage.promises import ended
from sglang_tiered.wire.keys import PEER, make_keys

pytestmark = pytest.mark.timeout(120)

SEED, SIZE, COUNT = 1, 100_000, 40


@pytest.fixture
def roster() -> list[Target]:
    return []


@pytest.fixture
def own(roster: list[Target], tmp_path: Path) -> Iterator[Sharer]:
    with sharer(roster, tmp_path / "own") as one:
        yield one


@pytest.fixture
def near(roster: list[Target], tmp_path: Path) -> Iterator[Sharer]:
    with sharer(roster, tmp_path / "near") as one:
        one.store(stored_run(SEED, SIZE, COUNT))
        yield one


def is_right(run: Run) -> bool:
    expected = stored_run(SEED, SIZE, COUNT)
    return all(
        bytes(ours[0]) == bytes(theirs[0])
        for ours, theirs in zip(run.pages, expected.pages, strict=True)
    )


def is_untouched(run: Run) -> bool:
    return all(set(page[0]) == {0xA5} for page in run.pages)


def test_the_holder_is_killed_in_the_middle(
    own: Sharer, roster: list[Target], tmp_path: Path
) -> None:
    size, count = MiB, 64
    with SharerProcess(roster, tmp_path / "other", 7, size, count) as other:
        run = blank_run(7, size, count)
        own.finds(run.keys)
        job = own.tier.submit_load(run, deadline_s=20.0)
        eventually(lambda: own.tier._client.stats.num_requests > 4)
        other.strike()
        begun = time.monotonic()
        assert job.wait(20.0)
        assert time.monotonic() - begun < 4.5
    assert set(job.reasons) <= {Reason.OK, Reason.IO_ERROR}
    pages = zip(job.reasons, run.pages, stored_run(7, size, count).pages, strict=True)
    assert all(bytes(o[0]) == bytes(e[0]) for reason, o, e in pages if reason is Reason.OK)
    if Reason.IO_ERROR in job.reasons:
        assert list(own.tier._loader._silent.values()) == [1], "it is avoided from now on"
    eventually(lambda: own.tier.stats().num_peers == 0)
    assert not any(own.tier.contains(run.keys))
    assert own.load(blank_run(7, size, count)) == [Reason.MISS] * count


def test_the_only_other_server_goes_and_comes_back(
    own: Sharer, roster: list[Target], tmp_path: Path
) -> None:
    run = blank_run(SEED, SIZE, COUNT)
    with sharer(roster, tmp_path / "near") as near:
        near.store(stored_run(SEED, SIZE, COUNT))
        own.finds(run.keys)
        port = near.tier.port
    roster.append(Target("127.0.0.1", port))  # it is gone, and should be there
    eventually(lambda: own.tier.health is Health.MISS_ONLY)
    assert own.tier.lookup(run.keys) == LookupResult(0, Stop.UNHEALTHY)
    assert own.tier.contains(run.keys) == [False] * COUNT
    assert own.load(run) == [Reason.MISS] * COUNT
    assert str(port) in own.tier.stats().health_reason
    assert own.tier.stats().is_discovering
    roster.append(Target("no-such-host.invalid", 1))
    eventually(lambda: not own.tier.stats().is_discovering)
    roster.pop()
    with sharer(roster, tmp_path / "near", listen_port=port):
        own.finds(run.keys)
        assert own.load(run) == [Reason.OK] * COUNT
        assert is_right(run)
        roster.remove(Target("127.0.0.1", port))


def test_a_server_with_other_keys_gets_nothing(roster: list[Target], tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        make_keys(tmp_path / name, [PEER])
    run = stored_run(SEED, SIZE, COUNT)
    keys = str(tmp_path / "ours")
    with (
        sharer(roster, tmp_path / "a", keys=keys) as first,
        sharer(roster, tmp_path / "b", keys=keys) as second,
        sharer(roster, tmp_path / "c", keys=str(tmp_path / "theirs")) as stranger,
        sharer(roster, tmp_path / "d") as bare,
    ):
        first.store(run)
        second.finds(run.keys)
        for outsider in (stranger, bare):
            eventually(lambda outsider=outsider: outsider.tier.stats().num_failures > 2)
            target = blank_run(SEED, SIZE, COUNT)
            assert outsider.tier.contains(run.keys) == [False] * COUNT
            assert outsider.load(target, deadline_s=5.0) == [Reason.MISS] * COUNT
            assert is_untouched(target)
        assert first.tier.stats().num_served == 0
        target = blank_run(SEED, SIZE, COUNT)
        assert second.load(target) == [Reason.OK] * COUNT
        assert is_right(target)


def test_closing_ends_what_is_under_way(own: Sharer, roster: list[Target], tmp_path: Path) -> None:
    run = blank_run(SEED, SIZE, COUNT)
    with SharerProcess(roster, tmp_path / "other", SEED, SIZE, COUNT) as other:
        own.finds(run.keys)
        other.freeze()
        job = own.tier.submit_load(run)
        own.tier.close()
        assert job.wait(20.0)
        assert job.reasons == [Reason.CANCELLED] * COUNT
    assert own.tier.health is Health.FAILED
    assert own.load(run) == [Reason.CANCELLED] * COUNT
    assert is_untouched(run)
    assert own.tier.lookup(run.keys).stop is Stop.UNHEALTHY
    own.tier.close()


@pytest.mark.parametrize("changes", [{"listen_host": "192.0.2.1"}, {"keys_directory": "nowhere"}])
def test_impossible_settings_are_refused_and_leave_nothing(
    changes: dict[str, str], own: Sharer, roster: list[Target]
) -> None:
    with pytest.raises(ConfigError):
        PeerTier(
            quick(roster, **changes),
            namespace=NAMESPACE,
            region=own.region,
            erase=lambda _: ended(True),
        )
