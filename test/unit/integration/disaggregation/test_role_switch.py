"""A manager gives back what it took, and what the process knows outlives it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import pytest
import requests
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVReceiver,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_context, get_parallel

from kit.waiting import eventually
from server_process import free_port
from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode, TransferConfig
from sglang_tiered.flags import MiB
from sglang_tiered.integration.disaggregation.handoffs import Handoffs, WeightUpdate
from sglang_tiered.integration.disaggregation.manager import (
    ZmqKVReceiver,
    ZmqKVSender,
    make_manager,
)
from sglang_tiered.integration.hooks import _after_decode_queue
from sglang_tiered.transfer.messages import Asked
from sglang_tiered.wire.keys import make_keys

pytestmark = pytest.mark.timeout(120)

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
LAYERS, PAGES, PAGE_BYTES = 2, 16, 256


class Rank:
    """A scheduler's part: pools, and a manager of one role after the other."""

    def __init__(self, folder: Path, bootstrap_port: int) -> None:
        self.pools = {
            "kv": np.zeros((2 * LAYERS, PAGES, PAGE_BYTES), np.uint8),
            "aux": np.zeros((1, PAGES, 64), np.uint8),
        }
        self.address = f"127.0.0.1:{bootstrap_port}"
        self.has_metrics = True
        nvme = NvmeConfig(directory=str(folder), capacity_bytes=64 * MiB, region_bytes=4 * MiB)
        transfer = TransferConfig(keys_directory=str(folder / "keys"), model_name="m")
        if not (folder / "keys").exists():
            make_keys(folder / "keys")
        self.handoffs = Handoffs(TieredConfig(mode=TierMode.NVME, nvme=nvme, transfer=transfer))

    def make(self, role: DisaggregationMode, replica: int = 0) -> Any:
        args: dict[str, Any] = dict.fromkeys(
            ("kv_layout", "host_kv_data_ptrs", "mla_compression_ratios")
        )
        args |= dict.fromkeys(("num_draft_entries", "gpu_id", "engine_rank", "pp_rank"), 0)
        args |= {"page_size": 4, "kv_cache_dtype_str": "bfloat16", "system_dp_rank": replica}
        args |= {"total_kv_head_num": 4, "kv_head_num": 4, "kv_layer_ids": [*range(LAYERS)] * 2}
        for name, buffers in self.pools.items():
            args[f"{name}_data_ptrs"] = [part.ctypes.data for part in buffers]
            args[f"{name}_data_lens"] = [part.nbytes for part in buffers]
            args[f"{name}_item_lens"] = [part[0].nbytes for part in buffers]
        for what in ("types", "item_lens", "data_ptrs", "data_lens"):
            args[f"state_{what}"] = []
        server_args = SimpleNamespace(enable_metrics=self.has_metrics, enable_pd_role_switch=True)
        return make_manager(self.handoffs, SimpleNamespace(**args), role, server_args, False)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    registry = prometheus_client.CollectorRegistry()  # or other tests could make no exporter
    for name in ("Counter", "Gauge", "Histogram"):
        kind = partial(getattr(prometheus_client, name), registry=registry)
        monkeypatch.setattr(prometheus_client, name, kind)
    made = Rank(tmp_path, port := free_port())
    kinds = ("attn_tp", "attn_cp", "attn_dp", "attn_dcp")
    alone: dict[str, Any] = dict.fromkeys([f"{kind}_size" for kind in kinds], 1)
    alone |= dict.fromkeys([*(f"{kind}_rank" for kind in kinds), "tp_rank", "pp_rank"], 0)
    alone |= {"dp_rank": None, "pp_group": SimpleNamespace(is_last_rank=True)}
    settings: dict[str, Any] = {"host": "127.0.0.1", "device": "cpu"}
    settings |= {"disaggregation_bootstrap_port": port, "enable_pd_role_switch": True}

    def is_up() -> bool:
        try:
            return requests.get(f"http://{made.address}/health", timeout=5).ok
        except requests.ConnectionError:
            return False

    with ExitStack() as held:
        held.enter_context(get_context().override_server_args(**settings))
        held.enter_context(get_parallel().override(**alone))
        held.callback(CommonKVBootstrapServer("127.0.0.1", port).close)
        eventually(is_up)
        yield made


@pytest.mark.parametrize("ends", ["done", "prefill_aborts", "decode_aborts"])
def test_number_is_free_once_a_handoff_ended(rank: Rank, tmp_path: Path, ends: str) -> None:
    """Through SGLang's own classes, on both roles."""
    other = Rank(tmp_path, int(rank.address.split(":")[1]))
    rank.has_metrics = other.has_metrics = False  # a process has one rank's series
    rank.pools["kv"][:] = np.random.default_rng(1).integers(1, 256, rank.pools["kv"].shape)
    room, managers = 7, (rank.make(PREFILL), other.make(DECODE))
    prefill, decode = managers
    decode.forward_stream = torch.get_device_module().current_stream()
    with ExitStack() as held:
        for manager in managers:
            manager.arriving = Asked(b"", b"")
            held.callback(manager.teardown)
        eventually(lambda: decode.bootstrap_client.ensure_known(rank.address))
        with get_parallel().override(num_dp_ranks=1):
            sender = ZmqKVSender(prefill, rank.address, room)
        receiver = ZmqKVReceiver(decode, rank.address, room)
        receiver.init(0)
        receiver.send_metadata(np.array([3, 4]), 1, [], 0)
        eventually(lambda: sender.poll() == KVPoll.WaitingForInput)
        sender.init(2, 5)
        if ends == "done":
            sender.send(np.array([7, 8]), [])
        else:
            (sender if ends == "prefill_aborts" else receiver).abort()
        wanted = KVPoll.Success if ends == "done" else KVPoll.Failed
        for end in (sender, receiver):
            eventually(lambda end=end: end.poll() == wanted)
            if wanted == KVPoll.Failed:
                with pytest.raises(KVTransferError, match="(?i)abort|dropped"):
                    end.failure_exception()
            end.clear()
        for manager in managers:
            eventually(lambda manager=manager: manager.why_refused(room) is None)
            assert not manager.request_status and not manager.failure_records
            assert not manager.endpoint.num_rooms
        sent, landed = rank.pools["kv"][:, [7, 8]], other.pools["kv"][:, [3, 4]]
        assert np.array_equal(landed, sent if ends == "done" else np.zeros_like(sent))


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("kv-transfer")}


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_teardown_leaves_no_socket_thread_or_memory(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles turn for months."""
    name = "query_prefill_dp_ranks"  # which is put back afterwards
    monkeypatch.setattr(CommonKVReceiver, name, vars(CommonKVReceiver)[name])
    zmq, scheduler = SimpleNamespace(value="zmq"), SimpleNamespace(forward_stream=object())
    queue = partial(SimpleNamespace, transfer_backend=zmq, scheduler=scheduler)
    last: Any = lambda: None  # noqa: E731 - as a weak reference says it

    def is_gone() -> bool:
        gc.collect()
        return last() is None

    num_open: list[int] = []
    before = threads()  # of other tests
    for role in (PREFILL, DECODE) * 3:
        manager = rank.make(role)
        assert manager.supports_role_switch
        assert [one.name for one in threads() - before] == [f"kv-transfer-{role.value}"]
        eventually(is_gone, "the manager before, once this one's series are exported")
        if role is DECODE:
            manager.bootstrap_client.ensure_known(rank.address)
            _after_decode_queue(None, queue(kv_manager=manager))
            assert manager.forward_stream is scheduler.forward_stream, "it may still write there"
        last = weakref.ref(manager)
        manager.teardown()
        del manager
        eventually(lambda: not threads() - before)
        num_open.append(num_files())
    eventually(lambda: num_files() <= num_open[1], f"{num_open} files were open after each role")


@pytest.mark.parametrize("method", ["follow_bootstrap_room", "round_robin"])
def test_a_replica_knows_its_own_number(rank: Rank, method: str) -> None:
    """SGLang's sender asks for that of DP attention, which is 0 in each replica of ``--dp-size``. A
    server that began as decode tells decode who has the room."""
    room = 7
    with get_parallel().override(dp_size=2, num_dp_ranks=2, load_balance_method=method):
        manager = rank.make(PREFILL, replica=1)
        manager.arriving = Asked(b"", b"")
        try:
            ZmqKVSender(manager, rank.address, room)
            assert not manager.failure_records
            asked = {"bootstrap_rooms": [room]}
            answer = requests.post(f"http://{rank.address}/query_dp_ranks", json=asked, timeout=5)
            assert answer.json() == ({str(room): 1} if method == "round_robin" else {})
        finally:
            manager.teardown()


def test_replaced_weights_stay_replaced_after_a_switch(rank: Rank) -> None:
    """A manager that read the files of the start again handed over KV of others as theirs."""
    first = rank.make(PREFILL)
    eventually(lambda: first.endpoint._model is not None)
    of_start = first.endpoint._model
    first.weights_changed(WeightUpdate(), memory_is_clean=True)
    eventually(lambda: first.endpoint._model not in (None, of_start))
    replaced, adapters = first.endpoint._model, first.adapters
    first.teardown()
    second = rank.make(DECODE)
    eventually(lambda: second.endpoint._model is not None)
    assert second.endpoint._model == replaced and second.adapters is adapters
    second.teardown()
