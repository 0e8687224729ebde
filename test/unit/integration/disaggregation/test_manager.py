"""Why a handoff failed, on both of its ends, as SGLang asks for it."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.integration.disaggregation.manager import (
    DecodeKVManager,
    PrefillKVManager,
    ZmqKVReceiver,
    ZmqKVSender,
)
from sglang_tiered.transfer.messages import CHANGED

ROOM = 7
SERVER = "192.0.2.1:1"


def manager_of(kind: type[Any]) -> Any:
    role: Any = DecodeKVManager if kind is ZmqKVReceiver else PrefillKVManager
    manager = role.__new__(role)
    manager.attn_tp_size = manager.pp_size = 1
    manager.failure_lock, manager.failure_records = threading.Lock(), {}
    manager.leaving = set()
    manager.request_status = {}
    manager.required_prefill_response_num_table = {}
    manager.prefill_response_tracker, manager.addr_to_rooms_tracker = {}, defaultdict(set)
    manager.defer_decode_allocation = False
    manager.deferred_bootstrap, manager.bootstrap_timeout = None, 300.0
    manager._happened = threading.Event()
    manager._deferred_ack_targets, manager._deferred_ack_poisoned_rooms = {}, set()
    manager.transfer_infos, manager.req_to_decode_prefix_len = {}, {}
    manager._staging_outstanding = {}
    manager.is_dummy_cp_rank = False
    manager.endpoint, manager.bootstrap_client = Mock(), Mock()
    manager.bootstrap_client.lookup_failure = lambda _: None
    return manager


def reason_of(end: Any) -> KVTransferError:
    with pytest.raises(KVTransferError) as raised:
        end.failure_exception()
    return raised.value


BOTH = pytest.mark.parametrize("kind", [ZmqKVReceiver, ZmqKVSender])


@pytest.mark.parametrize("room", [2**63, -1, 10**30, 0, 2**63 - 1])
@BOTH
def test_oversized_room_number_fails_the_request(kind: type[Any], room: int) -> None:
    """Prefill's scheduler ended on it, and decode waited for an answer without end."""
    manager = manager_of(kind)
    with get_parallel().override(num_dp_ranks=1):
        end = kind(manager, SERVER, room)
    if 0 <= room < 2**63:
        assert end.conclude_state is None
        return
    assert end.poll() == KVPoll.Failed
    assert "from 0 to 2^63 - 1" in reason_of(end).failure_reason
    end.clear()
    said = [name for name, *_ in manager.endpoint.method_calls]
    assert not {"expect_room", "abort_room", "claim_room"} & set(said), "no message can hold it"
    assert not manager.request_status and not manager.addr_to_rooms_tracker


@BOTH
def test_second_request_leaves_a_taken_room_alone(kind: type[Any]) -> None:
    """It polled Success for pages that were never sent, and clearing the first ended the scheduler
    at the next poll of the second."""
    manager = manager_of(kind)
    with get_parallel().override(num_dp_ranks=1):
        first, second = kind(manager, SERVER, ROOM), kind(manager, SERVER, ROOM)
        assert (first.poll(), second.poll()) == (KVPoll.Bootstrapping, KVPoll.Failed)
        assert "draw another number" in reason_of(second).failure_reason
        manager.endpoint.reset_mock()
        second.abort()
        second.clear()
        assert not [call for call in manager.endpoint.method_calls if ROOM in call.args]
        manager._conclude(ROOM, KVPoll.Success)
        assert first.poll() == KVPoll.Success
        first.clear()
        assert second.poll() == KVPoll.Failed
        third = kind(manager, SERVER, ROOM)
        assert third.poll() == KVPoll.Bootstrapping, "the number is free again"


@pytest.mark.parametrize("aborts", [False, True])
@BOTH
def test_late_word_of_an_ended_room_harms_none(kind: type[Any], aborts: bool) -> None:
    """The next request of its number failed, or what is kept of a room grew."""
    manager = manager_of(kind)
    with get_parallel().override(num_dp_ranks=1):
        first = kind(manager, SERVER, ROOM)
        manager.room_failed(ROOM, "the first reason")
        if aborts and kind is ZmqKVSender:  # after which SGLang asks no more of it
            first.abort()
        said = reason_of(first).failure_reason
        assert said == "the first reason" or aborts
        early = kind(manager, SERVER, ROOM)
        assert "draw another number" in reason_of(early).failure_reason, "of the first may be said"
        manager.failure_records[ROOM] = "of a check just before it was cleared"
        manager.request_status[ROOM] = KVPoll.WaitingForInput  # likewise
        manager.req_to_decode_prefix_len[ROOM] = 3
        manager.room_dropped(ROOM)
        assert not manager.request_status and not manager.failure_records
        assert kind is ZmqKVReceiver or not manager.req_to_decode_prefix_len
        last = kind(manager, SERVER, ROOM)
        first.abort()
        first.clear()
        again = reason_of(first)  # it may still be in a queue
        assert (again.failure_reason, again.bootstrap_room) == (said, ROOM)
        assert last.poll() == KVPoll.Bootstrapping, "the number is another request's"


def test_prefill_found_late_hears_of_the_right_room() -> None:
    """Of a request that ended before its prefill server was known."""
    manager = manager_of(ZmqKVReceiver)
    receiver = ZmqKVReceiver(manager, SERVER, ROOM)
    manager.room_failed(ROOM, "no time left")
    assert reason_of(receiver).failure_reason == "no time left"
    (_, tell), _ = manager.bootstrap_client.call_with_ranks.call_args
    tell([("192.0.2.1", 2)])
    (room, (target,), reason), _ = manager.endpoint.abort_room.call_args
    assert (room, target, reason) == (ROOM, ("192.0.2.1", 2), "no time left")


def test_late_page_numbers_are_read_once_written() -> None:
    """SGLang hands over a tensor that the device has yet to write; a copy at the call sends pages
    of somebody else."""
    manager = manager_of(ZmqKVSender)
    manager.request_status = {ROOM: KVPoll.WaitingForInput}
    manager.pp_group = SimpleNamespace(is_last_rank=True)
    numbers, computed, written = torch.zeros(3, dtype=torch.int64), Mock(), Mock()
    computed.query.return_value = written.query.return_value = False
    manager.add_transfer_request(
        ROOM, numbers, slice(0, 3), False, wait_event=computed, indices_event=written
    )
    (_, chunk), _ = manager.endpoint.send_chunk.call_args
    numbers.copy_(torch.tensor([5, 1, 4]))
    for event in (computed, written):
        assert not chunk.is_computed()
        event.query.return_value = True
    assert chunk.is_computed()
    assert list(chunk.pages) == [5, 1, 4]


@BOTH
def test_rooms_of_replaced_weights_end_first(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV of before must not be taken as that of after, nor what is received but not yet taken."""
    manager = manager_of(kind)
    monkeypatch.setattr(type(manager), "server", "192.0.2.2:2")
    manager.request_status = {ROOM: KVPoll.Success, ROOM + 1: KVPoll.Transferring}
    manager.handed = Mock()
    ended: list[Any] = []
    manager.handed.weights_changed = lambda *_, **__: ended.extend(manager.endpoint.method_calls)
    manager.weights_changed(Mock(), memory_is_clean=True)
    if kind is ZmqKVSender:
        assert [CHANGED in call.args[0] for call in ended if call[0] == "fail_rooms"] == [True]
        return
    assert [call[1] for call in ended if call[0] == "close_room"] == [(ROOM,), (ROOM + 1,)]
    assert set(manager.request_status.values()) == {KVPoll.Failed}
    assert all(CHANGED in manager.failure_records[room] for room in (ROOM, ROOM + 1))


def test_request_without_a_replica_fails_with_reason() -> None:
    receiver = ZmqKVReceiver(manager_of(ZmqKVReceiver), SERVER, ROOM)
    receiver.init(-1)
    assert receiver.poll() == KVPoll.Failed
    assert "does not say which replica" in reason_of(receiver).failure_reason
