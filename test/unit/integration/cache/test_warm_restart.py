"""The list of prompts to warm up: what a purge may not leave in it, and what it says of tenants."""

from __future__ import annotations

import errno
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kit.clock import Clock
from kit.waiting import eventually
from sglang_tiered.checksummed import seal
from sglang_tiered.errors import StoreError
from sglang_tiered.integration.cache.ahead import warm_restart
from sglang_tiered.integration.cache.ahead.chain_loader import Chain, PieceOutcome, chain_of
from sglang_tiered.integration.cache.ahead.warm_restart import WarmHost, remove_list
from sglang_tiered.integration.cache.hiding_cache import HidingCache
from sglang_tiered.integration.identity.tenants import HiddenTenants, tenant_digest
from sglang_tiered.policy.hints import LIFE_S
from sglang_tiered.policy.warm_list import decode
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.files import TEMPORARY_SUFFIX, WARM_NAME
from sglang_tiered.storage.region.notes import Notes

TIMEOUT_S = 20.0
ACME, OTHER = tenant_digest("acme", "s3cret"), tenant_digest("other", None)


class Tier:
    """A server's list over a real directory; the tree above it only says what it is asked."""

    def __init__(self, directory: Path, *, is_eagle: bool = False) -> None:
        self.directory = directory
        self.clock = Clock()
        self.num_begun = self.num_stopped = 0
        self.outcome: PieceOutcome | None = None
        self.notes = Notes(FileDevice(directory))
        self.is_slow = False
        self.asked: list[tuple[str | None, str | None]] = []
        self.cache: Any = HidingCache.__new__(HidingCache)
        self.cache.tree_core = SimpleNamespace(is_eagle=is_eagle)
        self.cache.hidden_tenants, self.cache.page_size = HiddenTenants(), 16
        self.cache.storage = object()
        loads: Any = SimpleNamespace(is_loading_or_waiting=lambda: False)
        self.loader: Any = SimpleNamespace(
            is_loading=False, take_piece=lambda: (0, None), begin=self._begin,
            stop=self._stop, clear=lambda: None,
        )  # fmt: skip
        self.host = WarmHost(self.cache, loads, self.loader, self.notes, 10_000, self.clock)

    def _begin(self, chain: Chain, end: int, storage: Any) -> PieceOutcome:
        assert end == len(chain.tokens) - self.cache.tree_core.is_eagle == 64
        self.num_begun += 1
        if self.outcome is not None:
            return self.outcome
        if self.is_slow:
            self.loader.is_loading = True
            return PieceOutcome.BEGUN
        self.asked.append((chain.extra_key, chain.cache_salt))
        return PieceOutcome.NOTHING

    def _stop(self) -> None:
        self.num_stopped += self.loader.is_loading
        self.loader.is_loading = False

    def use(self, chain: str, extra_key: str | None, cache_salt: str | None) -> None:
        tokens = array("q", range(64 + 1))
        request = SimpleNamespace(
            full_untruncated_fill_ids=tokens, extra_key=extra_key, cache_salt=cache_salt
        )
        self.host.note_loaded_back(request, chain, 64, [])

    def load_all(self) -> list[tuple[str | None, str | None]]:
        for _ in range(10):
            self.host.tick()
        return self.asked

    @property
    def path(self) -> Path:
        return self.directory / WARM_NAME

    def tenants(self) -> set[bytes]:
        return {chain.tenant for chain in decode(self.notes.read(WARM_NAME))}


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    """With a list of three kinds of requests on the disk, and a while to go to its next save."""
    tier = Tier(tmp_path)
    tier.use("nobody", None, None)
    tier.use("acme", "acme", "s3cret")
    tier.use("other", "other", None)
    tier.host.tick()
    eventually(lambda: len(tier.tenants()) == 3)
    yield tier
    tier.host.close()


@pytest.fixture
def again(tier: Tier) -> Iterator[Tier]:
    """The server after a restart."""
    again = Tier(tier.directory)
    yield again
    again.host.close()


def pages(hashes: list[str]) -> Erasure:
    return Erasure.of(map(bytes.fromhex, hashes))


def finished(purge: Future[bool]) -> bool:
    return is_true(purge, TIMEOUT_S)


def test_purge_is_durable_once_the_list_forgot(
    tier: Tier,
) -> None:
    assert finished(tier.host.erase(Erasure(tenant=ACME)))
    assert ACME not in tier.tenants()
    assert OTHER in tier.tenants()
    assert finished(tier.host.erase(Erasure()))
    assert not tier.tenants()


def test_forgotten_prompts_leave_the_file(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    tier.use("a", "acme", "s3cret")
    tier.use("b", "other", None)
    tier.host.close()
    tier = Tier(tmp_path)
    tier.use("c", "other", None)  # who is named now, acme is not
    key = RadixKey(array("q", range(64)), "third")
    done = tier.host.erase(pages(get_storage_hash_str(key, None, page_size=16)))
    assert done.result(TIMEOUT_S)
    assert tier.tenants() == {OTHER}
    key = RadixKey(array("q", range(64)), "other")
    done = tier.host.erase(pages(get_storage_hash_str(key, None, page_size=16)[3:]))
    assert done.result(TIMEOUT_S)
    assert tier.tenants() == set()
    tier.host.name_keys("acme", "s3cret")
    assert tier.load_all() == [], "what cannot be told was loaded"
    tier.host.close()


def test_each_erasure_hashes_only_new_prompts(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str | None] = []

    def watched(cache: Any, tokens: array[int], extra_key: str | None, salt: str | None) -> Chain:
        hashed.append(extra_key)
        return chain_of(cache, tokens, extra_key, salt)

    monkeypatch.setattr(warm_restart, "chain_of", watched)
    assert finished(tier.host.erase(pages(["00" * 32])))
    assert len(hashed) == 3
    tier.use("third", "third", None)
    for _ in range(2):
        assert finished(tier.host.erase(pages(["00" * 32])))
    assert hashed[3:] == ["third"]


def test_a_full_disk_removes_a_hidden_tenants_list(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tier.notes._device, "replace_file", full)
        assert finished(tier.host.erase(Erasure(tenant=ACME)))
        assert not tier.path.exists()
    assert finished(tier.host.erase(Erasure()))


def test_an_unwritable_list_fails_the_purge_and_retries(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(warm_restart, "SAVE_INTERVAL_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(tier.notes._device, "replace_file", broken)
        patch.setattr(tier.notes._device, "unlink", broken)
        assert not finished(tier.host.erase(Erasure(tenant=ACME)))
        assert ACME in tier.tenants()
    eventually(lambda: ACME not in tier.tenants())


def test_the_list_holds_no_key_and_no_salt(tier: Tier) -> None:
    data = tier.path.read_bytes()
    assert b"acme" not in data and b"s3cret" not in data and b"other" not in data


def test_a_tenants_prompts_wait_for_its_keys(again: Tier) -> None:
    assert again.load_all() == [(None, None)]
    again.host.name_keys("acme", "wrong")
    assert again.load_all() == [(None, None)]
    again.host.name_keys("acme", "s3cret")
    again.host.name_keys("acme", "s3cret")
    assert again.load_all() == [(None, None), ("acme", "s3cret")]
    again.host.erase(Erasure(tenant=OTHER))
    again.host.name_keys("other", None)
    assert len(again.load_all()) == 2, "purged before it was named"


def test_purge_stops_the_load_of_its_tenant(again: Tier) -> None:
    """Else its later pieces would come to memory after it."""
    again.load_all()
    again.is_slow = True
    again.host.name_keys("acme", "s3cret")
    again.host.tick()
    assert again.loader.is_loading
    again.host.erase(Erasure(tenant=OTHER))
    assert again.host._chain is not None
    again.host.erase(Erasure(tenant=ACME))
    assert again.host._chain is None


def test_last_page_of_pairs_is_loaded_too(tmp_path: Path) -> None:
    tier = Tier(tmp_path, is_eagle=True)
    tier.use("nobody", None, None)
    tier.host.close()
    again = Tier(tmp_path, is_eagle=True)
    assert again.load_all() == [(None, None)]
    again.host.close()


def test_warm_loads_go_by_the_keys_of_now(again: Tier) -> None:
    """Nobody would find what is loaded by a key from before a purge."""
    again.cache.hidden_tenants.quarantine(None)
    marked = again.cache.hidden_tenants.key_of(None, None)
    assert again.load_all() == [(marked, None)]


def test_warm_loads_rest_for_a_flush(again: Tier) -> None:
    again.is_slow = True
    again.host.tick()
    assert again.loader.is_loading
    again.host.rest()
    assert again.num_stopped == 1
    again.is_slow = False
    assert again.load_all() == []
    again.clock.now += warm_restart.REST_S
    assert again.load_all() == [(None, None)]
    again.host.name_keys("acme", "s3cret")
    again.host.rest()
    assert again.load_all() == [(None, None)]
    again.host.tree_was_reset()
    assert again.load_all() == [(None, None), ("acme", "s3cret")], "what it rested for is done"


def test_warm_piece_on_a_hung_tier_ends(again: Tier) -> None:
    again.is_slow = True
    again.host.tick()
    again.clock.now += LIFE_S - 1
    again.host.tick()
    assert again.loader.is_loading
    again.clock.now += 1
    again.host.tick()
    assert again.num_stopped == 1 and again.host._chain is None


def test_a_hung_disk_ends_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_restart, "CLOSE_S", 0.05)
    tier, goes_on = Tier(tmp_path), threading.Event()
    monkeypatch.setattr(tier.notes._device, "replace_file", lambda *_: goes_on.wait(TIMEOUT_S))
    stop = threading.Thread(target=tier.host.close, daemon=True)
    stop.start()
    stop.join(TIMEOUT_S / 2)
    assert not stop.is_alive(), "it waits for the disk"
    goes_on.set()


def test_prompt_that_must_wait_goes_last(again: Tier) -> None:
    """Each look matches all of it in the tree."""
    again.outcome = PieceOutcome.LATER
    again.host.name_keys("acme", "s3cret")
    assert again.load_all() == []
    assert again.num_begun == 1
    again.outcome = None
    again.clock.now += warm_restart.LATER_S
    assert again.load_all() == [("acme", "s3cret"), (None, None)]


def test_a_list_with_keys_is_removed_at_start(tmp_path: Path) -> None:
    first = {"version": 1, "chains": [{"tokens": bytes(512), "extra_key": "acme"}]}
    (tmp_path / WARM_NAME).write_bytes(seal(first))
    (tmp_path / (WARM_NAME + TEMPORARY_SUFFIX)).write_bytes(b"acme")
    tier = Tier(tmp_path)
    assert not list(tmp_path.glob(f"{WARM_NAME}*"))
    assert tier.load_all() == []
    tier.host.close()


def test_without_the_flag_an_earlier_list_goes(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_list(tier.notes)
    assert not tier.path.exists()
    remove_list(tier.notes)

    def broken(name: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tier.notes._device, "unlink", broken)
    with pytest.raises(StoreError, match="Read-only file system"):
        remove_list(tier.notes)


def test_erased_tenant_stays_out_of_the_list(tier: Tier) -> None:
    """One that ran meanwhile, was retracted, and is loaded back from host memory."""
    tier.cache.hidden_tenants.quarantine(ACME)
    assert finished(tier.host.erase(Erasure(tenant=ACME)))
    tier.use("late", "acme", "s3cret")
    assert finished(tier.host.erase(Erasure(tenant=bytes(16)))), "and what was noted is written"
    assert ACME not in tier.tenants()


def test_list_goes_on_in_tiers_attached_again(tmp_path: Path) -> None:
    """The device of before is closed: no purge would be durable any more."""
    tier = Tier(tmp_path)
    tier.use("acme", "acme", "s3cret")

    def closed(*_: Any) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    tier.host.attached(cast("Notes", SimpleNamespace(write=closed, remove=closed)))
    assert not finished(tier.host.erase(Erasure(tenant=OTHER)))
    tier.host.attached(tier.notes)
    assert finished(tier.host.erase(Erasure(tenant=ACME)))
    assert not tier.tenants()
    tier.host.close()
