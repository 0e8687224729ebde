"""Purges on the scheduler thread: begun once, asked about later, and never waiting for a disk."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration import hooks
from sglang_tiered.integration.admin import control as purging
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT, Fence, tenant_digest
from sglang_tiered.storage.promises import keep, promise

if TYPE_CHECKING:
    from concurrent.futures import Future

A = tenant_digest("a", None)


class Scheduler:
    def __init__(self, *, idle: bool) -> None:
        self.idle = idle
        self.refuses_flushes = False
        self.purges: dict[bytes | None, Future[bool]] = {}
        self.told: list[bytes | None] = []  # to other servers
        self.num_flushes = 0
        self.waiting_queue = [request("a"), request("b")]
        self.grammar_manager = SimpleNamespace(grammar_queue=[request("a")])
        self.tree_cache = TieredRadixCache.__new__(TieredRadixCache)
        self.tree_cache.tp_world_size = 1
        storage = SimpleNamespace(begin_purge=self.begin_purge)
        self.tree_cache.cache_controller = SimpleNamespace(storage_backend=storage)

    def begin_purge(
        self, tenant: bytes | None, *, was_told: bool = False, tells_peers: bool = True
    ) -> Future[bool]:
        if tells_peers and not was_told:
            self.told.append(tenant)
        return self.purges.setdefault(tenant, promise())

    def is_fully_idle(self) -> bool:
        return self.idle

    def flush_cache(self) -> bool:
        """With SGLang's own look at whether it may, and our hook behind it."""
        flushed = self.is_fully_idle() and not self.refuses_flushes
        self.num_flushes += flushed
        hooks._after_flush_cache(flushed, self)
        return flushed


def request(extra_key: str | None) -> Any:
    return SimpleNamespace(extra_key=extra_key, cache_salt=None, lora_id=None)


@pytest.fixture(autouse=True)
def fence(monkeypatch: pytest.MonkeyPatch) -> Fence:
    fence = Fence()
    monkeypatch.setattr(TieredRadixCache, "fence", fence)
    monkeypatch.setattr(
        TieredRadixCache, "storage", property(lambda self: self.cache_controller.storage_backend)
    )
    monkeypatch.setattr(purging._desk, "has_tiers", True)
    return fence


def ask(scheduler: Scheduler, number: str, **body: Any) -> dict[str, Any]:
    return purging.handle(scheduler, purging.PREFIX + "purge", {"id": number, **body})


def test_an_idle_scheduler_resets_its_tree_at_once(fence: Fence) -> None:
    scheduler = Scheduler(idle=True)
    assert ask(scheduler, "idle", extra_key="a")["in_memory"] == "gone"
    assert scheduler.num_flushes == 1
    assert not fence
    assert set(scheduler.purges) == {A, UNKNOWN_TENANT}
    assert scheduler.told == [A]


def test_a_busy_scheduler_hides_the_tenant_until_it_is_idle(fence: Fence) -> None:
    scheduler = Scheduler(idle=False)
    assert ask(scheduler, "busy", extra_key="a")["in_memory"] == "hidden"
    waiting, other = scheduler.waiting_queue
    (compiling,) = scheduler.grammar_manager.grammar_queue
    assert waiting.extra_key == compiling.extra_key != "a"
    assert other.extra_key == "b"
    new = request("a")
    hooks._after_request(None, new, "rid")
    assert new.extra_key == waiting.extra_key
    assert fence.blocks(A)
    hooks._after_on_idle(None, scheduler)
    assert scheduler.num_flushes == 0
    scheduler.idle = True
    hooks._after_on_idle(None, scheduler)
    hooks._after_on_idle(None, scheduler)
    assert scheduler.num_flushes == 1
    assert not fence
    assert ask(scheduler, "busy")["in_memory"] == "gone"


def test_a_flush_that_was_refused_leaves_the_tenant_hidden_until_one_succeeds(
    fence: Fence,
) -> None:
    """As when a read that was given up begins to matter between our look and SGLang's."""
    scheduler = Scheduler(idle=True)
    scheduler.refuses_flushes = True
    assert ask(scheduler, "refused", extra_key="a")["in_memory"] == "hidden"
    assert scheduler.num_flushes == 0
    new = request("a")
    hooks._after_request(None, new, "rid")
    assert new.extra_key != "a", "a request of the tenant matches what the tree still holds"
    scheduler.refuses_flushes = False
    hooks._after_on_idle(None, scheduler)
    assert scheduler.num_flushes == 1
    assert not fence


def requests_of_adapters(*requests: tuple[str | None, str | None]) -> list[Req]:
    """SGLang's own requests, hooked as in a server, by what their users sent: ``extra_key`` and an
    adapter."""
    return [
        Req("rid", "", [1], SamplingParams(), lora_id=lora_id, extra_key=extra_key)
        for extra_key, lora_id in requests
    ]


def test_no_key_of_a_user_names_the_pages_of_an_adapter() -> None:
    adapter, other = "0" * 32, "1" * 32
    first = requests_of_adapters(("acme", adapter))[0].extra_key
    assert first is not None
    sent = [
        (None, None), (None, adapter), (None, other), ("acme", adapter), ("acme", other),
        ("acme", None), (adapter, None), (f"acme{adapter}", None), (f"acme{adapter}", adapter),
        (first, None), (first, adapter), (f"{first}{adapter}", None),
        (first.removesuffix(adapter), None), (first.removesuffix(adapter), adapter),
    ]  # fmt: skip
    pages = array("q", range(64))
    keys = {
        get_storage_hash_str(RadixKey(pages, extra_key=made.extra_key), page_size=64)[0]
        for made in requests_of_adapters(*sent)
    }
    assert len(keys) == len(sent)
    assert requests_of_adapters((None, None), ("acme", None))[0].extra_key is None
    assert requests_of_adapters(("acme", None))[0].extra_key == "acme", "its pages are found again"
    assert first.endswith(adapter), "SGLang reads the adapter's name off the end"


def test_a_tenants_adapters_are_purged_with_it(fence: Fence) -> None:
    scheduler = Scheduler(idle=False)
    adapter = requests_of_adapters(("a", "0" * 32), ("b", "0" * 32))
    scheduler.waiting_queue = list(adapter)
    before = [made.extra_key for made in adapter]
    ask(scheduler, "adapters", extra_key="a")
    assert adapter[0].extra_key != before[0]
    assert adapter[1].extra_key == before[1]
    assert {fence.tenant_of(was, None) for was in before} == {A, tenant_digest("b", None)}
    assert set(scheduler.purges) == {A, UNKNOWN_TENANT}
    (new,) = requests_of_adapters(("a", "0" * 32))
    assert new.extra_key == adapter[0].extra_key
    assert fence.tenant_of(new.extra_key, None) == A


def test_requests_of_a_server_without_tiers_keep_sglangs_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other: Any = SimpleNamespace(tree_cache=object())
    purging.attach(other)
    (made,) = requests_of_adapters(("acme", "0" * 32))
    assert made.extra_key == "acme" + "0" * 32


@pytest.mark.parametrize("is_durable", [True, False])
def test_asking_again_learns_whether_it_is_durable(is_durable: bool) -> None:
    scheduler = Scheduler(idle=True)
    number = f"again {is_durable}"
    assert ask(scheduler, number, extra_key="a") == {
        "done": False, "durable": False, "in_memory": "gone",
    }  # fmt: skip
    *others, last = scheduler.purges.values()
    for purge in others:
        keep(purge, True)
    assert ask(scheduler, number, extra_key="a")["done"] is False
    keep(last, is_durable)
    assert ask(scheduler, number, extra_key="a") == {
        "done": True, "durable": is_durable, "in_memory": "gone",
    }  # fmt: skip
    assert scheduler.num_flushes == 1


def test_a_purge_while_the_tier_is_detached_is_no_success(
    monkeypatch: pytest.MonkeyPatch, fence: Fence
) -> None:
    """Attached again, the tier would serve what its owner was told is gone."""
    config = SimpleNamespace(nvme=SimpleNamespace(flush_purges=False))
    monkeypatch.setattr(purging.TieredConfig, "from_environment", lambda: config)
    scheduler = Scheduler(idle=False)
    controller = scheduler.tree_cache.cache_controller
    storage, controller.storage_backend = controller.storage_backend, None
    for _ in range(2):
        answer = ask(scheduler, "detached", extra_key="a")
        assert "attach it and purge again" in answer["error"]
    assert fence.blocks(A), "memory forgets it all the same"
    controller.storage_backend = storage
    assert ask(scheduler, "detached", extra_key="a")["durable"] is False
    assert set(scheduler.purges) == {A, UNKNOWN_TENANT}


def test_a_server_without_nvme_has_purged_when_memory_forgot() -> None:
    scheduler = Scheduler(idle=True)
    scheduler.tree_cache.cache_controller.storage_backend = None
    assert ask(scheduler, "host", extra_key="a") == {
        "done": True, "durable": True, "in_memory": "gone",
    }  # fmt: skip


def test_everything_is_one_purge_of_all() -> None:
    scheduler = Scheduler(idle=True)
    ask(scheduler, "all", all=True)
    assert set(scheduler.purges) == {None}


def test_what_another_server_purged_is_out_of_reach_and_not_told_again(fence: Fence) -> None:
    scheduler = Scheduler(idle=False)
    purging.attach(scheduler)
    assert scheduler.tree_cache.purge_as_told is not None
    scheduler.tree_cache.purge_as_told(A)
    assert set(scheduler.purges) == {A, UNKNOWN_TENANT}
    assert scheduler.told == []
    assert scheduler.waiting_queue[0].extra_key != "a"
    assert fence.blocks(A)
    assert scheduler.num_flushes == 0
    scheduler.idle = True
    hooks._after_on_idle(None, scheduler)
    assert scheduler.num_flushes == 1
    assert not fence


@pytest.mark.parametrize("wanted", [True, False])
def test_flush_empties_nvme_only_where_the_flag_says_so(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    config = SimpleNamespace(nvme=SimpleNamespace(flush_purges=wanted))
    monkeypatch.setattr(purging.TieredConfig, "from_environment", lambda: config)
    scheduler = Scheduler(idle=True)
    hooks._after_flush_cache(False, scheduler)
    assert not scheduler.purges
    hooks._after_flush_cache(True, scheduler)
    assert set(scheduler.purges) == ({None} if wanted else set())


def test_a_reset_for_a_purge_does_not_empty_nvme(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(nvme=SimpleNamespace(flush_purges=True))
    monkeypatch.setattr(purging.TieredConfig, "from_environment", lambda: config)
    scheduler = Scheduler(idle=True)
    ask(scheduler, "one tenant", extra_key="a")
    assert set(scheduler.purges) == {A, UNKNOWN_TENANT}


@pytest.mark.parametrize("flush_purges", [True, False])
def test_sglangs_clear_empties_memory_and_never_what_is_stored(
    monkeypatch: pytest.MonkeyPatch, flush_purges: bool
) -> None:
    """It reached this server's NVMe, the bucket and every other server."""
    config = SimpleNamespace(nvme=SimpleNamespace(flush_purges=flush_purges))
    monkeypatch.setattr(purging.TieredConfig, "from_environment", lambda: config)

    def original(*_: Any) -> None:
        raise AssertionError("SGLang's way clears the storage")

    scheduler = Scheduler(idle=False)
    assert hooks._around_clear(original, scheduler, None).success is False
    scheduler.idle = True
    assert hooks._around_clear(original, scheduler, None).success is True
    assert scheduler.num_flushes == 1
    assert (scheduler.purges, scheduler.told) == ({}, [])
    other = SimpleNamespace(tree_cache=object())
    assert hooks._around_clear(lambda *each: each, other, None) == (other, None)


def test_messages_of_sglang_pass_and_an_error_of_ours_is_answered() -> None:
    sent: list[Any] = []
    channel = SimpleNamespace(send_output=lambda reply, request: sent.append(reply))
    scheduler = SimpleNamespace(
        ipc_channels=SimpleNamespace(send_to_tokenizer=channel), tree_cache=object()
    )
    passed: list[Any] = []
    message = SimpleNamespace(method="reset", body={})
    hooks._around_dumper_control(lambda *each: passed.append(each), scheduler, message)
    assert passed == [(scheduler, message)]
    ours = SimpleNamespace(method=purging.PREFIX + "purge", body={"id": "x"})
    hooks._around_dumper_control(lambda *each: passed.append(each), scheduler, ours)
    assert "has no tiers" in sent[0].response[0]["error"]
    scheduler.tree_cache = Scheduler(idle=True).tree_cache
    scheduler.tree_cache.cache_controller = None
    hooks._around_dumper_control(lambda *each: passed.append(each), scheduler, ours)
    assert sent[1].success is False and len(passed) == 1
