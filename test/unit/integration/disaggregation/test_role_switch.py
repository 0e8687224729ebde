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
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVReceiver
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_context, get_parallel

from kit.waiting import eventually
from server_process import free_port
from sglang_tiered.config import MiB, NvmeConfig, TieredConfig, TierMode, TransferConfig
from sglang_tiered.integration.disaggregation.handoffs import Handoffs
from sglang_tiered.integration.disaggregation.manager import ZmqKVSender, make_manager
from sglang_tiered.integration.hooks import _after_decode_queue
from sglang_tiered.transfer.messages import Asked
from sglang_tiered.wire.keys import make_keys

pytestmark = pytest.mark.timeout(120)

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
LAYERS, PAGES, PAGE_BYTES = 2, 16, 256


class Rank:
    """A scheduler's part: pools, and a manager of one role after the other."""

    def __init__(self, folder: Path, bootstrap_port: int) -> None:
        self.kv = np.zeros((2 * LAYERS, PAGES, PAGE_BYTES), np.uint8)
        self.aux = np.zeros((1, PAGES, 64), np.uint8)
        self.bootstrap_port = bootstrap_port
        nvme = NvmeConfig(directory=str(folder), capacity_bytes=64 * MiB, region_bytes=4 * MiB)
        transfer = TransferConfig(keys_directory=str(folder / "keys"), model_name="m")
        make_keys(folder / "keys")
        self.handoffs = Handoffs(TieredConfig(mode=TierMode.NVME, nvme=nvme, transfer=transfer))

    def make(self, role: DisaggregationMode, replica: int = 0) -> Any:
        args = SimpleNamespace(
            page_size=4,
            kv_cache_dtype_str="bfloat16",
            kv_layout=None,
            **_pool("kv", self.kv),
            kv_layer_ids=[*range(LAYERS)] * 2,
            **_pool("aux", self.aux),
            **{f"state_{what}": [] for what in ("types", "item_lens", "data_ptrs", "data_lens")},
            host_kv_data_ptrs=None,
            num_draft_entries=0,
            total_kv_head_num=4,
            kv_head_num=4,
            gpu_id=0,
            engine_rank=0,
            system_dp_rank=replica,
            pp_rank=0,
            mla_compression_ratios=None,
        )
        server_args = SimpleNamespace(enable_metrics=True, enable_pd_role_switch=True)
        return make_manager(self.handoffs, args, role, server_args, False)

    def route(self) -> requests.Response:
        """What a decode server is told of where this rank listens."""
        query = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
        return requests.get(f"http://127.0.0.1:{self.bootstrap_port}/route?{query}", timeout=5)


def _pool(name: str, buffers: Any) -> dict[str, list[int]]:
    return {
        f"{name}_data_ptrs": [part.ctypes.data for part in buffers],
        f"{name}_data_lens": [part.nbytes for part in buffers],
        f"{name}_item_lens": [part[0].nbytes for part in buffers],
    }


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    registry = prometheus_client.CollectorRegistry()  # or other tests could make no exporter
    for name in ("Counter", "Gauge", "Histogram"):
        kind = partial(getattr(prometheus_client, name), registry=registry)
        monkeypatch.setattr(prometheus_client, name, kind)
    port = free_port()
    alone: dict[str, Any] = {
        f"{kind}_{what}": int(what == "size")
        for kind in ("attn_tp", "attn_cp", "attn_dp", "attn_dcp")
        for what in ("size", "rank")
    }
    group = SimpleNamespace(is_last_rank=True)
    with ExitStack() as held:
        held.enter_context(
            get_context().override_server_args(
                host="127.0.0.1",
                device="cpu",
                disaggregation_bootstrap_port=port,
                enable_pd_role_switch=True,
            )
        )
        held.enter_context(
            get_parallel().override(**alone, tp_rank=0, pp_rank=0, dp_rank=None, pp_group=group)
        )
        server = CommonKVBootstrapServer("127.0.0.1", port)
        held.callback(server.close)
        made = Rank(tmp_path, port)

        def is_up() -> bool:
            try:
                return made.route().status_code == 503
            except requests.ConnectionError:
                return False

        eventually(is_up)
        yield made


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
            manager.bootstrap_client.ensure_known(f"127.0.0.1:{rank.bootstrap_port}")
            _after_decode_queue(None, queue(kv_manager=manager))
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
    address, room = f"127.0.0.1:{rank.bootstrap_port}", 7
    with get_parallel().override(dp_size=2, num_dp_ranks=2, load_balance_method=method):
        manager = rank.make(PREFILL, replica=1)
        manager.arriving = Asked(b"", b"")
        try:
            ZmqKVSender(manager, address, room)
            assert not manager.failure_records
            asked = {"bootstrap_rooms": [room]}
            told = requests.post(f"http://{address}/query_dp_ranks", json=asked, timeout=5).json()
            assert told == ({str(room): 1} if method == "round_robin" else {})
        finally:
            manager.teardown()
