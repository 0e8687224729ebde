"""Weight updates end a namespace, and what SGLang does not know of a message is done beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    LoadLoRAAdapterReqInput,
    PdRoleSwitchReqInput,
    PdRoleSwitchReqOutput,
    ReleaseMemoryOccupationReqInput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager as SGLangUpdater,
)

from sglang_tiered.integration import scheduler_messages
from sglang_tiered.integration.admin.control import Control
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.disaggregation.handoffs import WeightUpdate
from sglang_tiered.integration.hooks import Hooks
from sglang_tiered.integration.scheduler_messages import SchedulerMessages
from sglang_tiered.policy.server_costs import NOT_IDLE

DONE, REFUSED = SimpleNamespace(success=True), SimpleNamespace(success=False)
DISK = UpdateWeightFromDiskReqInput(model_path="new", flush_cache=False)
FLUSHING_DISK = UpdateWeightFromDiskReqInput(model_path="new", flush_cache=True)
PART, FLUSHING_PART = (
    UpdateWeightsFromDistributedReqInput(names=[], dtypes=[], shapes=[], flush_cache=is_wanted)
    for is_wanted in (False, True)
)
BEGIN, END = BeginWeightUpdateReqInput(), EndWeightUpdateReqInput()


class Server:
    """SGLang's scheduler with tiers, which notes whether stores go on after a change."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_idle = self.is_empty = True
        self.cache = cache_alone()
        self.updater = SimpleNamespace(
            _session=None, memory_saver_adapter=SimpleNamespace(enabled=True)
        )
        self.result: Any = DONE
        scheduler = SimpleNamespace(
            tree_cache=self.cache,
            weight_updater=self.updater,
            _engine_paused=False,
            is_fully_idle=lambda ignore_waiting: self.is_idle,
            _request_dispatcher=self.dispatch,
        )
        self.send = SchedulerMessages(scheduler, Control())
        self.told: list[bool] = []

        def change_weights(_: Any, *, tree_is_empty: bool) -> None:
            self.told.append(tree_is_empty)

        self.hidden: list[Any] = []
        patch.setattr(scheduler_messages, "hide_memory", self.hidden.append)
        patch.setattr(TieredRadixCache, "change_weights", change_weights)
        patch.setattr(TieredRadixCache, "is_empty", property(lambda _: self.is_empty))
        patch.setattr(TieredRadixCache, "quiesce", lambda _: True)
        self.features = SimpleNamespace(enable_weights_cpu_backup=False)
        execution = SimpleNamespace(features=self.features)
        patch.setattr(scheduler_messages, "get_exec", lambda: execution)

    def dispatch(self, message: Any) -> Any:
        if message is BEGIN and self.result.success:
            self.updater._session = message
        elif message is END:
            self.updater._session = None
        return self.result


def cache_alone() -> Any:
    """A cache of one rank."""
    cache: Any = TieredRadixCache.__new__(TieredRadixCache)
    cache.attn_cp_group = cache.attn_tp_group = None
    cache.tp_world_size = cache.pp_size = 1
    return cache


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


@pytest.mark.parametrize("result", [DONE, REFUSED])
@pytest.mark.parametrize(("is_idle", "is_empty"), [(True, True), (True, False), (False, True)])
def test_weight_update_reports_what_memory_holds(
    server: Server, result: Any, is_idle: bool, is_empty: bool
) -> None:
    server.is_idle, server.is_empty, server.result = is_idle, is_empty, result
    assert server.send(DISK) is result
    assert server.told == [is_idle and is_empty]


def worker(*, is_loaded: bool, role: str = "target") -> Any:
    loader = SimpleNamespace(update_weights_from_disk=lambda *_, **__: (is_loaded, "told"))
    runner = SimpleNamespace(weight_updater=loader)
    return SimpleNamespace(weight_update_runners=lambda: [(role, runner)])


@pytest.mark.parametrize("draft_fails", [False, True])
def test_refused_flush_tells_whether_weights_are_complete(
    monkeypatch: pytest.MonkeyPatch, draft_fails: bool
) -> None:
    """KV of half an update would go by the name of the whole; or prefill answered 503 until the
    update was repeated, flushed or not."""
    told: list[WeightUpdate] = []
    handoff = SimpleNamespace(weights_changed=lambda update, **_: told.append(update))
    monkeypatch.setattr(scheduler_messages, "manager_of", lambda _: handoff)
    updater = SGLangUpdater.__new__(SGLangUpdater)
    updater.scheduler = SimpleNamespace(
        record_weight_version_change=lambda **_: None,
        is_fully_idle=lambda **_: False,
        weight_updater=updater,
        _engine_paused=False,
        _request_dispatcher=updater.update_weights_from_disk,
        tree_cache=object(),
    )
    updater.metrics_collector = updater._session = None
    updater.flush_cache = lambda **_: False
    updater.tp_worker = worker(is_loaded=True)
    updater.draft_worker = worker(is_loaded=not draft_fails, role="draft")
    hooks, flush = Hooks(on_cpu=True), SGLangUpdater.flush_cache_after_weight_update
    hooks.around_scheduler(lambda *_: None, updater.scheduler, None)

    def flush_as_hooked(self: Any, *given: Any) -> Any:
        result = flush(self, *given)
        hooks.after_flush_of_update(result, self, *given)
        return result

    monkeypatch.setattr(SGLangUpdater, "flush_cache_after_weight_update", flush_as_hooked)
    assert not updater.scheduler._request_dispatcher(FLUSHING_DISK).success
    updater.tp_worker = worker(is_loaded=False)
    updater.scheduler._request_dispatcher(DISK)
    assert [update.is_complete for update in told] == [not draft_fails, False], "another update"


@pytest.mark.parametrize(
    ("sent", "refused", "is_empty", "told", "num_hidden"),
    [
        ([PART, BEGIN], [PART, BEGIN], True, [], 0),
        # While a session is open nothing is stored, whoever writes the weights.
        ([BEGIN, PART, END], [PART], True, [False, True, True], 0),
        # The call that ends it cannot say that a flush was wanted, and one may have been refused.
        (
            [BEGIN, FLUSHING_PART, END, BEGIN, PART, END],
            *([], False, [False, True, True, False, False, False], 2),
        ),
        # Where the update asked for none SGLang serves the old KV, by the operator's will.
        ([FLUSHING_DISK, DISK], [], False, [True, False], 1),
    ],
)
def test_updates_store_and_hide_what_they_must(
    server: Server, sent: Any, refused: Any, is_empty: bool, told: list[bool], num_hidden: int
) -> None:
    server.is_empty = is_empty
    for message in sent:
        server.result = REFUSED if message in refused else DONE
        server.send(message)
    assert (server.told, len(server.hidden)) == (told, num_hidden)


@pytest.mark.parametrize(
    ("tags", "saver", "kept", "told"),
    [
        (None, True, False, [False]),
        (["weights"], True, False, [False]),
        (["kv_cache"], True, False, []),
        (["weights"], True, True, []),
        (["weights"], False, False, []),
    ],
)
def test_kv_of_released_weights_is_not_stored(
    server: Server, tags: Any, saver: bool, kept: bool, told: list[bool]
) -> None:
    server.updater.memory_saver_adapter.enabled = saver
    server.features.enable_weights_cpu_backup = kept
    server.send(ReleaseMemoryOccupationReqInput(tags=tags))
    assert server.told == told


def test_adapter_that_failed_to_load_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    adapters = SimpleNamespace(
        note_loaded=lambda *given: told.append(given), note_unloaded=told.append
    )
    handoff = SimpleNamespace(adapters=adapters)
    monkeypatch.setattr(scheduler_messages, "manager_of", lambda _: handoff)
    for result in (REFUSED, DONE):
        without_tiers = {"tree_cache": object(), "_request_dispatcher": lambda _, r=result: r}
        send = SchedulerMessages(SimpleNamespace(**without_tiers), Control())
        send(LoadLoRAAdapterReqInput(lora_name="x", lora_path="/x", lora_id="1"))
        send(UnloadLoRAAdapterReqInput(lora_name="x", lora_id="1"))
    assert told == [("1", "/x", "x"), "1"]


class Switching:
    """A scheduler with tiers, whose role SGLang switches."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        cache = cache_alone()
        cache.tiering = self.tiering = SimpleNamespace(awaits_stores=False)
        self.result = PdRoleSwitchReqOutput(
            success=True, old_role="prefill", new_role="decode", safe_to_restore=True
        )
        flushed = SimpleNamespace(memory_was_flushed=lambda: self.said.append("handoff"))
        patch.setattr(scheduler_messages, "manager_of", lambda _: SimpleNamespace(handed=flushed))
        control = Control()
        patch.setattr(control, "rest", lambda: self.said.append("rest"))
        patch.setattr(control, "memory_was_flushed", lambda: self.said.append("tenants"))
        costs = SimpleNamespace(publish_if_due=lambda _: self.said.append("costs"))
        patch.setattr(control, "costs", costs)
        mode = SimpleNamespace(value="prefill")
        of_sglang = {"disaggregation_mode": mode, "_request_dispatcher": self.dispatch}
        self.send = SchedulerMessages(SimpleNamespace(tree_cache=cache, **of_sglang), control)

    def dispatch(self, message: Any) -> Any:
        self.said.append("prepare" if message.prepare_only else "sglang")
        return self.result


@pytest.fixture
def switching(monkeypatch: pytest.MonkeyPatch) -> Switching:
    return Switching(monkeypatch)


@pytest.mark.parametrize("own", ["ready", f"{NOT_IDLE}; drain", "too little memory"])
@pytest.mark.parametrize("other", [2, 1, 0])
def test_no_rank_switches_while_another_refuses(
    monkeypatch: pytest.MonkeyPatch, switching: Switching, own: str, other: int
) -> None:
    """Each looks at its own device's memory. Ranks of two roles wait for each other for ever. What
    one can never do no other makes a refusal that passes: for that the server would be drained."""
    switching.result.success, switching.result.message = own == "ready", own
    told = {"ready": 2, "too little memory": 0}.get(own, 1)

    def least(_: Any, values: list[int]) -> list[int]:
        return [min(*values, other)]

    monkeypatch.setattr(scheduler_messages, "least_on_every_rank", least)
    answer = switching.send(PdRoleSwitchReqInput(new_role="decode"))
    assert answer.success is (min(told, other) == 2) and answer.safe_to_restore
    if not answer.success:
        assert (NOT_IDLE in answer.message) is (min(told, other) == 1)
        assert ("another rank" in answer.message) is (other < told)
        assert switching.said == ["rest", "prepare"]


@pytest.mark.parametrize("kept", ["", "prepare", "refused", "same role"])
def test_only_a_switch_ends_what_flushes_end(switching: Switching, kept: str) -> None:
    switching.result.success = kept != "refused"
    if kept == "same role":
        switching.result.old_role = "decode"
    switching.send(PdRoleSwitchReqInput(new_role="decode", prepare_only=kept == "prepare"))
    ended = ["sglang", "tenants", "handoff", "costs"]
    assert switching.said == ["rest", "prepare", *([] if kept else ended)]


def test_switch_waits_for_what_is_not_stored(switching: Switching) -> None:
    """SGLang takes the server for idle, and resets the tree that would have been stored."""
    switching.tiering.awaits_stores = True
    refused = switching.send(PdRoleSwitchReqInput(new_role="decode"))
    assert (
        not refused.success and refused.safe_to_restore and "wait to be stored" in refused.message
    )
    switching.tiering.awaits_stores = False
    assert switching.send(PdRoleSwitchReqInput(new_role="decode")).success
    assert switching.said[:4] == ["rest", "rest", "prepare", "sglang"]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_release_waits_for_stages_that_are_busy(server: Server, num_stages: int) -> None:
    """SGLang ends a scheduler that it finds busy, and with it the server. One stage has waited
    until all of it ended."""
    server.is_idle, server.cache.pp_size = False, num_stages
    given = server.send(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    assert (given is DONE) == (num_stages == 1)
