"""``--disaggregation-transfer-backend zmq``: SGLang's disaggregation over ``transfer``.

SGLang's ``Common*`` classes keep what they do well: the bootstrap server, rank mapping, the
monotone status of each room. Replaced are their sockets, their HTTP in the scheduler loop and
their heartbeat: the endpoint binds to ``--host``, and a peer's end fails its rooms at once.
Status is written by the endpoint's thread and read by the scheduler's, as SGLang's own backends do.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_device

from sglang_tiered.config import TieredConfig, TransferConfig
from sglang_tiered.errors import TransferError
from sglang_tiered.integration.compat import check_signatures
from sglang_tiered.integration.disaggregation import kv_pools
from sglang_tiered.integration.disaggregation.bootstrap_client import (
    PrefillLookups,
    RankKey,
    address_of,
    addresses_of,
    forget_ranks,
    is_loopback,
    is_wildcard,
)
from sglang_tiered.integration.disaggregation.transfer_seams import SIGNATURES
from sglang_tiered.integration.observe.exporter import MetricsExporter
from sglang_tiered.integration.observe.transfer_stats import transfer_stats
from sglang_tiered.metrics import TRANSFER_METRICS
from sglang_tiered.transfer.addresses import check_is_allowed
from sglang_tiered.transfer.decode.endpoint import DecodeEndpoint, Target
from sglang_tiered.transfer.prefill.endpoint import PrefillEndpoint
from sglang_tiered.transfer.prefill.send_queue import Chunk
from sglang_tiered.transfer.settings import TransferSettings
from sglang_tiered.wire.keys import Keys, load_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sglang_tiered.transfer.decode.session import Address

__all__ = ["CLASSES", "ZmqKVManager", "ZmqKVReceiver", "ZmqKVSender"]

REST_S = 0.005

NUM_ROOMS = 2**63
"""Numbers that a request may name its room by, from 0: larger ones SGLang's tensors do not hold."""

logger = logging.getLogger(__name__)


class ZmqKVManager(CommonKVManager):  # type: ignore[misc]
    """One rank's side of every handoff. Made by SGLang's bootstrap and preallocation queues."""

    reports_transfer_latency = True

    def __init__(
        self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        check_signatures(SIGNATURES)
        config = TieredConfig.from_environment()
        self._transfer = (config.transfer if config is not None else None) or TransferConfig()
        self._layout = kv_pools.layout_of(args, server_args, is_mla_backend, self._transfer.codec)
        self._memories = kv_pools.memories_of(args, _device_of(args))
        self.host_memory = kv_pools.host_memory_of(args)
        self.supports_host_destination = self.host_memory is not None
        self._exporter: MetricsExporter | None = None
        self._happened = threading.Event()
        self.sending: PrefillEndpoint | None = None
        self.receiving: DecodeEndpoint | None = None
        super().__init__(args, mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # SGLang's own is open to all addresses
        if mode == DisaggregationMode.DECODE:
            self._lookups = PrefillLookups(self, self.check_is_allowed)
            self.receiving = DecodeEndpoint(
                layout=self._of_rank(),
                memories=self._memories,
                listener=self,
                settings=self._settings(),
                keys=self._keys("decode"),
                on_tick=self._export,
            )

    def register_to_bootstrap(self) -> None:
        """Listen, then announce where. Called by the constructor, on prefill only."""
        host = address_of(self.bootstrap_host)
        keys = self._keys("prefill")
        if keys is None and not is_loopback(host):
            logger.warning(
                "KV transfer listens on %s without --transfer-keys: whoever reaches this port can "
                "read the KV of requests it opens. Make keys with python -m sglang_tiered keygen, "
                "or close the network.",
                host,
            )
        self.sending = PrefillEndpoint(
            host=host,
            layout=self._of_rank(),
            memories=self._memories,
            rank=self._prefill_unique_rank(),
            listener=self,
            settings=self._settings(),
            keys=keys,
            on_tick=self._export,
        )
        self.rank_port = self.sending.control_port
        if not is_wildcard(host):
            self.local_ip = host
        super().register_to_bootstrap()

    @property
    def endpoint(self) -> PrefillEndpoint | DecodeEndpoint | None:
        return self.sending or self.receiving

    def rest(self) -> None:
        """Wait a moment for a room to move, while this instance has nothing to compute. On the
        scheduler's thread; only where it would take a core from who computes."""
        if self.endpoint is not None and self.endpoint.num_rooms:
            self._happened.wait(REST_S)
            self._happened.clear()

    def _export(self) -> None:
        endpoint = self.endpoint
        if endpoint is None or not self.server_args.enable_metrics:
            return
        if self._exporter is None:
            read = partial(transfer_stats, endpoint)
            self._exporter = MetricsExporter(read, metrics=TRANSFER_METRICS)
        self._exporter.export()

    def _of_rank(self) -> Any:
        return kv_pools.at_rank(self._layout, self.attn_tp_rank, self.attn_tp_size)

    def _settings(self) -> TransferSettings:
        chosen = self._transfer
        return TransferSettings(
            peer_timeout_s=chosen.peer_timeout_s,
            window_bytes=chosen.window_bytes,
            num_connections=chosen.num_connections,
            same_host=chosen.same_host,
            encrypt_data=chosen.encrypt_data,
            allowed_networks=chosen.allowed_networks,
        )

    def _keys(self, role: str) -> Keys | None:
        directory: Path | None = self._transfer.keys_path
        return None if directory is None else load_keys(directory, role)

    # Prefill, called by SGLang's scheduler.

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: Any,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        assert self.sending is not None
        if self.request_status.get(bootstrap_room) in (None, KVPoll.Failed):
            return
        if not isinstance(index_slice, slice):
            reason = "context-parallel prefill scatters pages, which zmq does not send"
            self.sending.fail(bootstrap_room, reason)
            self._conclude(bootstrap_room, KVPoll.Failed, reason)
            return
        sends_metadata = aux_index is not None and self.pp_group.is_last_rank
        self.sending.send(
            bootstrap_room,
            Chunk(
                _pages(kv_indices),
                index_slice.start,
                is_last_chunk,
                [None if rows is None else _pages(rows) for rows in state_indices or ()],
                aux_index if sends_metadata else None,
                _is_computed(wait_event),
            ),
        )

    # What became of rooms; the endpoint's thread.

    def room_ready(self, room: int, prefix_tokens: int) -> None:
        if room in self.request_status:
            self.req_to_decode_prefix_len[room] = prefix_tokens
            self.update_status(room, KVPoll.WaitingForInput)
            self._happened.set()

    def room_sent(self, room: int) -> None:
        self._conclude(room, KVPoll.Success)

    room_received = room_sent

    def room_failed(self, room: int, reason: str) -> None:
        self._conclude(room, KVPoll.Failed, reason)

    def prefill_lost(self, address: Address, reason: str) -> None:
        """Its rooms have failed. What was looked up of it is forgotten: a successor has another
        port, and perhaps another layout."""
        for bootstrap_address in self._lookups.forget(address):
            forget_ranks(self, bootstrap_address)
            for room in list(self.addr_to_rooms_tracker.get(bootstrap_address, ())):
                # Those still without pages have no room at the endpoint.
                if self.request_status.get(room) == KVPoll.WaitingForInput:
                    self._conclude(room, KVPoll.Failed, reason)

    def _conclude(self, room: int, status: int, reason: str | None = None) -> None:
        # A room that SGLang has cleared must not come back with a failure of before.
        if room not in self.request_status:
            return
        if reason is not None:
            with self.failure_lock:
                self.failure_records.setdefault(room, reason)
        self.update_status(room, status)
        self._happened.set()

    # Decode, called by SGLang's scheduler.

    def check_is_allowed(self, host: str) -> None:
        """Raises ``TransferError`` for a prefill server that decode takes no KV from. Resolves
        names, so not on the scheduler's thread."""
        if self._transfer.keys_path is None or self._transfer.allowed_networks:
            for address in addresses_of(host):
                check_is_allowed(address, self._transfer.allowed_networks)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill server is known by now. Asks it in the background."""
        return self._lookups.is_known(bootstrap_addr)

    def use_server(self, bootstrap_addr: str) -> None:
        self._lookups.use(bootstrap_addr)

    def replicas_of(self, bootstrap_addr: str, bootstrap_rooms: list[int]) -> dict[str, int]:
        """In the place of SGLang's ``query_prefill_dp_ranks``."""
        return self._lookups.replicas_of(bootstrap_addr, bootstrap_rooms)

    def rank_of(self, bootstrap_address: str, key: RankKey) -> Address | None:
        return self._lookups.rank_of(bootstrap_address, key)

    def tell_ranks(self, server: str, tell: Callable[[list[Address]], None]) -> None:
        self._lookups.tell_ranks(server, tell)

    def why_unknown(self, bootstrap_address: str) -> str | None:
        return self._lookups.why_unknown(bootstrap_address)


class _End:
    """What both ends of a handoff share. Before SGLang's class."""

    kv_mgr: Any
    bootstrap_room: int
    conclude_state: Any
    _failure: KVTransferError | None = None

    def __init__(self, mgr: ZmqKVManager, *args: Any, **kwargs: Any) -> None:
        super().__init__(mgr, *args, **kwargs)  # type: ignore[call-arg]
        # A client chooses the number. A larger one ends prefill's scheduler, which writes it into
        # a tensor, and no message can name one beyond 64 bits.
        if not 0 <= self.bootstrap_room < NUM_ROOMS:
            reason = "the bootstrap_room of a request must be a number from 0 to 2^63 - 1"
            self.kv_mgr.room_failed(self.bootstrap_room, reason)
            self.conclude_state = KVPoll.Failed

    def failure_exception(self) -> None:
        """Raises ``KVTransferError``, as often as SGLang asks: it asks again while the request
        waits to be removed, has forgotten by then, and would answer its client that the reason is
        unknown and another rank's."""
        try:
            super().failure_exception()  # type: ignore[misc]
        except KVTransferError as error:
            if self._failure is None and not error.is_from_another_rank:
                self._failure = error
        if self._failure is not None:
            raise self._failure
        is_alone = self.kv_mgr.attn_tp_size * self.kv_mgr.pp_size == 1
        who = "this instance" if is_alone else "another rank of this instance"
        reason = f"the handoff was aborted by {who}; its log says why"
        raise KVTransferError(self.bootstrap_room, reason, is_from_another_rank=not is_alone)


class ZmqKVSender(_End, CommonKVSender):  # type: ignore[misc]
    """One request on one prefill rank."""

    def __init__(self, mgr: ZmqKVManager, *args: Any, **kwargs: Any) -> None:
        super().__init__(mgr, *args, **kwargs)
        if self.conclude_state is None and not mgr.is_dummy_cp_rank:
            _sending(mgr).expect(self.bootstrap_room)

    def abort(self) -> None:
        _sending(self.kv_mgr).fail(self.bootstrap_room, "the request was aborted on prefill")
        super().abort()

    def failure_exception(self) -> None:
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room)
        _sending(self.kv_mgr).fail(self.bootstrap_room, reason or "the request failed on prefill")
        super().failure_exception()

    def clear(self) -> None:
        super().clear()
        _sending(self.kv_mgr).forget(self.bootstrap_room)


class ZmqKVReceiver(_End, CommonKVReceiver):  # type: ignore[misc]
    """One request on one decode rank."""

    bootstrap_infos: list[dict[str, Any]] | None = None

    def __init__(self, mgr: ZmqKVManager, *args: Any, **kwargs: Any) -> None:
        super().__init__(mgr, *args, **kwargs)
        if self.conclude_state is not None:
            self.abort_notified = True  # prefill refuses the number itself

    @property
    def supports_host_destination(self) -> bool:
        return self.kv_mgr.host_memory is not None

    def is_abort_release_safe(self) -> bool:
        """Always: ``abort`` and ``clear`` close the room, and what is closed is not written."""
        return True

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """The request's pages are allocated: ask the prefill ranks for them."""
        if self.bootstrap_infos is None:
            self._fail(f"the prefill server at {self.bootstrap_addr} is unknown")
            return
        memory = None
        if destination == KVTransferDestination.HOST:
            memory = self.kv_mgr.host_memory
        rows = [None if rows is None else _pages(rows) for rows in state_indices or ()]
        try:
            _receiving(self.kv_mgr).open(
                self.bootstrap_room,
                self._targets(),
                pages=_pages(kv_indices),
                state_rows=rows,
                aux_row=aux_index,
                prefix_tokens=decode_prefix_len or 0,
                num_receivers=self.required_dst_info_num,
                memory=memory,
            )
        except TransferError as error:
            self._fail(str(error))
            return
        self.init_time = time.time()

    def abort(self) -> None:
        _receiving(self.kv_mgr).close_room(self.bootstrap_room)
        why = self.kv_mgr.why_unknown(self.bootstrap_addr)
        if why is not None and self.conclude_state is None:
            self._fail(why)
        super().abort()

    def _clear(self) -> None:
        _receiving(self.kv_mgr).close_room(self.bootstrap_room)
        if self.init_time is None and self._owns_bootstrap_room and not self.abort_notified:
            # Given up before it had pages: prefill waits for them.
            self.abort_notified = True
            if self.bootstrap_infos:
                self._send_abort_notification()
            else:
                self.kv_mgr.tell_ranks(self.bootstrap_addr, self._abort_at)
        super()._clear()
        if not self.kv_mgr.addr_to_rooms_tracker.get(self.bootstrap_addr):
            self.kv_mgr.addr_to_rooms_tracker.pop(self.bootstrap_addr, None)  # clients name it

    def _fail(self, reason: str) -> None:
        self.kv_mgr.room_failed(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed

    def _targets(self) -> list[Target]:
        return [
            Target((info["rank_ip"], info["rank_port"]), info["is_dummy"])
            for info in self.bootstrap_infos or ()
        ]

    def init(self, prefill_dp_rank: int) -> None:
        """The prefill ranks are known: tell them that this request is here."""
        self.kv_mgr.use_server(self.bootstrap_addr)
        if prefill_dp_rank < 0 and self.conclude_state is None:
            server = self.bootstrap_addr
            self._fail(f"the prefill server at {server} does not say which replica has the request")
        super().init(prefill_dp_rank)
        if self.conclude_state is None:
            _receiving(self.kv_mgr).claim(self.bootstrap_room, self._targets())

    def _register_kv_args(self) -> bool:
        """SGLang's registration, once per prefill server. Ours is in the session's Hello."""
        return True

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        key = (int(prefill_dp_rank), int(prefill_cp_rank), int(target_tp_rank), int(target_pp_rank))
        address = self.kv_mgr.rank_of(self.bootstrap_addr, key)
        if address is None:
            return None
        return {"rank_ip": address[0], "rank_port": address[1], "pp_rank": key[3]}

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        self._abort_at([target.address for target in self._targets()])

    def _abort_at(self, ranks: list[Address]) -> None:
        room = self.bootstrap_room
        reason = self.kv_mgr.failure_records.get(room, "the request was aborted")
        _receiving(self.kv_mgr).abort(room, [Target(rank) for rank in ranks], reason)


def _sending(manager: ZmqKVManager) -> PrefillEndpoint:
    assert manager.sending is not None
    return manager.sending


def _receiving(manager: ZmqKVManager) -> DecodeEndpoint:
    assert manager.receiving is not None
    return manager.receiving


def _device_of(args: Any) -> str:
    device = str(get_device().device)
    return device if device == "cpu" else f"{device}:{args.gpu_id}"


def _pages(indices: Any) -> Any:
    """A copy as int32: SGLang reuses its index buffers."""
    return np.array(indices, np.int32)


def _is_computed(event: Any) -> Any:
    return None if event is None else event.query


CLASSES = {
    "manager": ZmqKVManager,
    "sender": ZmqKVSender,
    "receiver": ZmqKVReceiver,
    "bootstrap_server": CommonKVBootstrapServer,
}
