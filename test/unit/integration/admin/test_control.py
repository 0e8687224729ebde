"""Purges on the scheduler thread: begun once, asked about later, and never waiting for a disk."""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import ClearHiCacheReqInput, DumperControlReqInput
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.streaming_session import StreamingSession

from sglang_tiered.integration.admin.control import Control
from sglang_tiered.integration.admin.service import CONTROL_PREFIX
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.identity.recent_requests import PrefixSelector, RecentRequests
from sglang_tiered.integration.identity.tenants import HiddenPages, HiddenTenants, tenant_digest
from sglang_tiered.integration.scheduler_messages import SchedulerMessages
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import keep, promise

A = tenant_digest("a", None)


class Scheduler:
    def __init__(self, *, idle: bool) -> None:
        self.idle = idle
        self.control = Control()
        self.refuses_flushes = False
        self.purges: dict[bytes | None, Future[bool]] = {}
        self.told: list[bytes | None] = []  # to other servers
        self.ids: list[bytes] = []  # of what was erased
        self.num_flushes = 0
        self.gave_memory_back = False  # to the device, as a flush by an operator does
        self.waiting_queue = [request("a"), request("b")]
        self.grammar_manager = SimpleNamespace(grammar_queue=[request("a")])
        self.disaggregation_mode = DisaggregationMode.NULL
        self.tree_cache = TieredRadixCache.__new__(TieredRadixCache)
        self.tree_cache.attn_cp_group = self.tree_cache.attn_tp_group = None
        self.tree_cache.tp_world_size = 1
        self.tree_cache.recent_requests = RecentRequests()
        self.tree_cache.hidden_pages = HiddenPages()
        storage = SimpleNamespace(erase=self.erase)
        self.tree_cache.cache_controller = SimpleNamespace(storage_backend=storage)
        self.sent: list[Any] = []
        channel = SimpleNamespace(send_output=lambda reply, _: self.sent.append(reply))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=channel)
        self.passed: list[Any] = []  # to SGLang's own table
        self._request_dispatcher = self.passed.append
        self.control.attach(self)

    def erase(self, what: Erasure) -> Future[bool]:
        assert what.keys is None
        self.ids.append(what.id)
        if what.spread:
            self.told.append(what.tenant)
        return self.purges.setdefault(what.tenant, promise())

    def is_fully_idle(self) -> bool:
        return self.idle

    def flush_cache(self, *, empty_cache: bool = True) -> bool:
        """SGLang's own look at whether it may, and the hook behind it."""
        flushed = self.is_fully_idle() and not self.refuses_flushes
        self.num_flushes += flushed
        self.gave_memory_back |= flushed and empty_cache
        if flushed:
            self.control.memory_was_flushed()
        return flushed


def request(extra_key: str | None) -> Any:
    return SimpleNamespace(extra_key=extra_key, cache_salt=None, lora_id=None, kv=ReqKvInfo())


@pytest.fixture(autouse=True)
def purged(monkeypatch: pytest.MonkeyPatch) -> HiddenTenants:
    purged = HiddenTenants()
    monkeypatch.setattr(TieredRadixCache, "hidden_tenants", purged, raising=False)
    monkeypatch.setattr(
        TieredRadixCache, "storage", property(lambda self: self.cache_controller.storage_backend)
    )
    return purged


def ask(scheduler: Scheduler, number: str, **body: Any) -> dict[str, Any]:
    message = SimpleNamespace(method=CONTROL_PREFIX + "purge", body={"id": number, **body})
    scheduler.control.reply(message)
    (answer,) = scheduler.sent[-1].response
    assert scheduler.sent[-1].success
    return dict(answer)


def arrives(scheduler: Scheduler) -> Any:
    """A request of tenant a."""
    made = request("a")
    scheduler.control.after_request(None, made, "rid")
    return made


@pytest.mark.parametrize("is_busy", [True, False])
def test_tenant_is_hidden_until_memory_is_flushed(purged: HiddenTenants, is_busy: bool) -> None:
    """A flush of an idle scheduler may be refused: an abandoned read may begin to count between the
    look here and SGLang's."""
    scheduler = Scheduler(idle=not is_busy)
    scheduler.refuses_flushes = not is_busy
    recents = scheduler.tree_cache.recent_requests
    recents.note_request("1", PrefixSelector(array("q", [1]), None, None), A, "chat")
    assert ask(scheduler, "busy", extra_key="a")["in_memory"] == "hidden"
    assert recents.find("1") is None
    waiting, other = scheduler.waiting_queue
    (compiling,) = scheduler.grammar_manager.grammar_queue
    new = arrives(scheduler)
    assert new.extra_key == waiting.extra_key == compiling.extra_key != "a" != other.extra_key
    assert purged.is_hidden("a", None)
    scheduler.control.after_idle()
    assert scheduler.num_flushes == 0
    scheduler.idle, scheduler.refuses_flushes = True, False
    scheduler.control.after_idle()
    scheduler.control.after_idle()
    assert scheduler.num_flushes == 1
    assert not purged
    assert ask(scheduler, "busy")["in_memory"] == "gone"


def test_requests_in_a_handoff_get_new_keys() -> None:
    """Prefill would match pages of the old weights, and hand them to decode."""
    scheduler: Any = Scheduler(idle=False)
    scheduler.disaggregation_mode = DisaggregationMode.PREFILL
    bootstrapping = request("a")
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[bootstrapping])
    ask(scheduler, "prefill", extra_key="a")
    assert bootstrapping.extra_key == arrives(scheduler).extra_key != "a"
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    waiting, promised, held = (request("a") for _ in range(3))
    promised.kv.req_pool_idx = 0
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(
        queue=[SimpleNamespace(req=waiting), SimpleNamespace(req=promised)],
        held_rebootstrap_reqs=[held],
    )
    scheduler.tree_cache.session = StreamingSession(scheduler.tree_cache)
    for each in (promised, held):
        each.session = None
    ask(scheduler, "decode", extra_key="a")
    assert waiting.extra_key == held.extra_key == arrives(scheduler).extra_key != "a"
    assert promised.extra_key == "a"


def hook_requests(monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler) -> None:
    """Hook SGLang's requests as in a server of this scheduler."""
    assert hasattr(Req.__init__, "__wrapped__"), "the plugin hooks it"
    hooked = _wrap_fn(unwrap(Req.__init__), scheduler.control.after_request, HookType.AFTER)
    monkeypatch.setattr(Req, "__init__", hooked)


def requests_of_adapters(*requests: tuple[str | None, str | None]) -> list[Req]:
    """SGLang's own requests, hooked, by what users sent: ``extra_key`` and an adapter."""
    return [
        Req("rid", "", [1], SamplingParams(), lora_id=lora_id, extra_key=extra_key)
        for extra_key, lora_id in requests
    ]


def test_no_user_key_names_an_adapters_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    hook_requests(monkeypatch, Scheduler(idle=True))
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


def test_long_keys_are_short_in_the_tree(
    monkeypatch: pytest.MonkeyPatch, purged: HiddenTenants
) -> None:
    """Each node of SGLang's tree keeps the keys of its request."""
    scheduler = Scheduler(idle=False)
    hook_requests(monkeypatch, scheduler)
    adapter, long = "0" * 32, "k" * 5000
    first = requests_of_adapters((long, None))[0].extra_key
    assert first is not None
    sent = [(long, None), (long + "k", None), (long, adapter), (first, None), (first, adapter),
            ("k" * 4096, None), ("\N{SNOWMAN}" * 2000, None)]  # fmt: skip
    made = requests_of_adapters(*sent)
    assert len({each.extra_key for each in made}) == len(sent), "nobody names another's"
    assert max(len(each.extra_key or "") for each in made) == 4096
    salted = Req("rid", "", [1], SamplingParams(), extra_key=long, cache_salt=long)
    assert salted.cache_salt is not None and len(salted.cache_salt) < 100
    scheduler.waiting_queue, before = [salted], salted.extra_key
    ask(scheduler, "long", extra_key=long, cache_salt=long)
    assert salted.extra_key != before
    assert purged.tenant_of(salted.extra_key, salted.cache_salt) in scheduler.purges


def test_a_tenants_adapters_are_purged_with_it(
    monkeypatch: pytest.MonkeyPatch, purged: HiddenTenants
) -> None:
    scheduler = Scheduler(idle=False)
    hook_requests(monkeypatch, scheduler)
    adapter = requests_of_adapters(("a", "0" * 32), ("b", "0" * 32))
    scheduler.waiting_queue = list(adapter)
    before = [made.extra_key for made in adapter]
    ask(scheduler, "adapters", extra_key="a")
    assert adapter[0].extra_key != before[0]
    assert adapter[1].extra_key == before[1]
    assert {purged.tenant_of(was, None) for was in before} == {A, tenant_digest("b", None)}
    assert set(scheduler.purges) == {A}
    (new,) = requests_of_adapters(("a", "0" * 32))
    assert new.extra_key == adapter[0].extra_key
    assert purged.tenant_of(new.extra_key, None) == A


@pytest.mark.parametrize("is_durable", [True, False])
def test_repeated_request_polls_the_same_purge(purged: HiddenTenants, is_durable: bool) -> None:
    scheduler = Scheduler(idle=True)
    number = f"again {is_durable}"
    told = {"done": False, "durable": False, "in_memory": "gone"}
    assert ask(scheduler, number, extra_key="a") == told
    assert not purged and not scheduler.gave_memory_back, "it stalls"
    (purge,) = scheduler.purges.values()
    assert ask(scheduler, number, extra_key="a") == told
    keep(purge, is_durable)
    assert ask(scheduler, number, extra_key="a") == {**told, "done": True, "durable": is_durable}
    assert scheduler.num_flushes == 1 and scheduler.told == [A]


def test_purge_of_a_detached_tier_is_an_error(
    monkeypatch: pytest.MonkeyPatch, purged: HiddenTenants
) -> None:
    """Attached again, the tier would serve what its owner was told is gone."""
    scheduler = Scheduler(idle=False)
    monkeypatch.setattr(scheduler.tree_cache, "config", SimpleNamespace(nvme=object()))
    controller = scheduler.tree_cache.cache_controller
    storage, controller.storage_backend = controller.storage_backend, None
    assert "attach it and ask again" in ask(scheduler, "detached", extra_key="a")["error"]
    assert purged.is_hidden("a", None), "memory forgets it all the same"
    controller.storage_backend = storage
    assert ask(scheduler, "attached", extra_key="a")["durable"] is False
    assert set(scheduler.purges) == {A}


def test_all_ranks_name_an_erasure_alike() -> None:
    """What a bucket knows by another name is of another server, and is erased once more."""
    ranks = [Scheduler(idle=True) for _ in range(2)]
    for number, body in enumerate(({"all": True}, {"extra_key": "a"}, {"extra_key": "a"})):
        for rank in ranks:
            ask(rank, str(number), **body)
    assert ranks[0].ids == ranks[1].ids
    assert len(set(ranks[0].ids)) == 3


def test_what_others_erased_is_hidden_in_memory(purged: HiddenTenants) -> None:
    scheduler = Scheduler(idle=False)
    scheduler.tree_cache.hide_heard([Erasure(tenant=A, spread=False)])
    assert not scheduler.purges, "the tiers have done it, by the name that its servers know"
    assert scheduler.waiting_queue[0].extra_key != "a"
    assert purged.is_hidden("a", None)
    scheduler.idle = True
    scheduler.control.after_idle()
    assert scheduler.num_flushes == 1
    assert not purged


def test_sglangs_clear_empties_memory_and_no_tier() -> None:
    """It reached this server's NVMe, the bucket and every other server."""
    scheduler: Any = Scheduler(idle=False)
    messages, clear = SchedulerMessages(scheduler, scheduler.control), ClearHiCacheReqInput()
    assert messages(clear).success is False
    scheduler.idle = True
    assert messages(clear).success is True
    assert scheduler.num_flushes == 1
    assert (scheduler.purges, scheduler.told) == ({}, [])
    assert not scheduler.passed, "SGLang's way clears the storage"
    scheduler.tree_cache = object()
    scheduler.control.attach(scheduler)
    messages(clear)
    assert scheduler.passed == [clear], "of another's storage"


def test_sglangs_messages_pass_and_internal_errors_are_answered() -> None:
    scheduler: Any = Scheduler(idle=True)
    scheduler.tree_cache.cache_controller = None
    messages = SchedulerMessages(scheduler, scheduler.control)
    message = DumperControlReqInput(method="reset", body={})
    messages(message)
    messages(DumperControlReqInput(method=CONTROL_PREFIX + "purge", body={"id": "x", "all": True}))
    assert scheduler.passed == [message] and scheduler.sent[0].success is False


def test_purge_without_nvme_ends_with_memory() -> None:
    scheduler = Scheduler(idle=True)
    scheduler.tree_cache.cache_controller.storage_backend = None
    told = {"done": True, "durable": True, "in_memory": "gone"}
    assert ask(scheduler, "host", extra_key="a") == told
