"""``--disaggregation-transfer-backend zmq``: SGLang's disaggregation over ``transfer``.

SGLang's ``Common*`` classes keep what they do well: the bootstrap server, rank mapping, the
monotone status of each room. Replaced are their sockets, their HTTP in the scheduler loop and
their heartbeat: the endpoint binds to ``--host``, and the loss of a peer fails its rooms at once.
The endpoint's thread writes each status and the scheduler's reads it, as in SGLang's own backends.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_serving

from sglang_tiered.config import TransferConfig
from sglang_tiered.errors import TransferError
from sglang_tiered.integration.compat import check_signatures
from sglang_tiered.integration.disaggregation import kv_pools
from sglang_tiered.integration.disaggregation.bootstrap_client import (
    BootstrapClient,
    address_of,
    addresses_of,
    check_num_ranks,
    drop_connections,
    shown_server,
)
from sglang_tiered.integration.disaggregation.device_memory import are_done, writes_so_far
from sglang_tiered.integration.disaggregation.request_rooms import NUM_ROOMS
from sglang_tiered.transfer.addresses import check_is_allowed
from sglang_tiered.transfer.decode import DecodeEndpoint
from sglang_tiered.transfer.messages import CHANGED, NOTHING_MORE, Asked
from sglang_tiered.transfer.prefill import PrefillEndpoint
from sglang_tiered.transfer.send_queue import Chunk
from sglang_tiered.wire.keys import Keys, load_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.integration.disaggregation.handoffs import (
        HandedModel,
        Handoffs,
        WeightUpdate,
    )
    from sglang_tiered.transfer.addresses import Address


REST_S = 0.005

_NO_ROOMS = itertools.count(-1, -1)
"""Numbers that no room has."""

_COMMON = "sglang.srt.disaggregation.common.conn:CommonKV"
_QUEUE = "sglang.srt.disaggregation.decode:DecodePreallocQueue"

SIGNATURES: dict[str, tuple[str, ...]] = {
    f"{_COMMON}Manager.__init__": (
        *("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
    ),
    f"{_COMMON}Manager.register_to_bootstrap": ("self",),
    f"{_COMMON}Manager.try_ensure_parallel_info": ("self", "bootstrap_addr"),
    f"{_COMMON}Manager._resolve_rank_mapping": ("self", "info"),
    f"{_COMMON}Manager.submit_prefill_recompute": ("self", "kv_receiver", "payload"),
    f"{_COMMON}Manager.update_status": ("self", "bootstrap_room", "status"),
    f"{_COMMON}Sender.send": ("self", "kv_indices", "state_indices"),
    f"{_COMMON}Sender.abort": ("self",),
    f"{_COMMON}Sender.clear": ("self",),
    f"{_COMMON}Sender.failure_exception": ("self",),
    f"{_COMMON}Receiver.init": ("self", "prefill_dp_rank"),
    f"{_COMMON}Receiver.send_metadata": (
        *("self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination"),
    ),
    f"{_COMMON}Receiver._get_bootstrap_info_from_server": (
        *("self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
    ),
    f"{_COMMON}Sender._poll_with_status": ("self", "check_status"),  # else ``poll`` is abstract
    "sglang.srt.disaggregation.base.conn:BaseKVManager.teardown": ("self",),
    "sglang.srt.disaggregation.role_switch:teardown_disaggregation": ("scheduler",),
    "sglang.srt.disaggregation.base.conn:BaseKVReceiver.supports_host_destination": ("self",),
    "sglang.srt.disaggregation.base.conn:BaseKVReceiver.is_abort_release_safe": ("self",),
    f"{_COMMON}Receiver.query_prefill_dp_ranks": ("bootstrap_addr", "bootstrap_rooms"),
    f"{_COMMON}Receiver._register_kv_args": ("self",),
    f"{_COMMON}Receiver._send_abort_notification": ("self", "force_arm"),
    f"{_COMMON}Receiver._clear": ("self",),
    f"{_COMMON}Receiver.failure_exception": ("self",),
    f"{_COMMON}Receiver.abort": ("self",),
    "sglang.srt.arg_groups.model_override_base:model_config_of": ("server_args",),
    f"{_QUEUE}._ensure_prefill_info": ("self", "addr_to_reqs"),
}
"""What this module relies on of SGLang, checked when a KV manager is made: only then is it used."""

logger = logging.getLogger(__name__)


def make_manager(
    handoffs: Handoffs, args: Any, mode: Any, server_args: Any, is_mla: bool | None = False
) -> PrefillKVManager | DecodeKVManager:
    """The KV manager of this role. SGLang's queues make it, of all but the first argument."""
    check_signatures(SIGNATURES)
    role = DecodeKVManager if mode == DisaggregationMode.DECODE else PrefillKVManager
    return role(handoffs, args, mode, server_args, is_mla)


class KVManagerRole(CommonKVManager):  # type: ignore[misc]
    """What both roles share: one rank's endpoint, its rooms' status."""

    reports_transfer_latency = True
    supports_role_switch = True
    arriving: Asked = NOTHING_MORE
    """What the request adds to the model whose end SGLang makes next."""
    recompute: Any = ()
    """Fields by which prefill is asked to compute it again, in the place of SGLang's."""

    endpoint: PrefillEndpoint | DecodeEndpoint
    end_rooms: Any

    def __init__(self, handoffs: Handoffs, *of_sglang: Any) -> None:
        args, _, server_args, _ = of_sglang
        config = handoffs.config
        self._transfer = (config.transfer if config is not None else None) or TransferConfig()
        device = kv_pools.device_of(args)
        self._memories = kv_pools.memories_of(args, device)
        self.has_streams = device != "cpu"
        self.host_memory = kv_pools.host_memory_of(args)
        self.supports_host_destination = self.host_memory is not None
        self._handoffs = handoffs
        self.handed: HandedModel | None = None  # until there is an endpoint to tell
        self._happened = threading.Event()
        self.leaving: set[int] = set()  # what the endpoint may still say is of an ended request
        super().__init__(*of_sglang)
        self.server_socket.close(linger=0)  # SGLang's own is open to all addresses
        self.adapters = handoffs.adapters
        self._hand = partial(
            handoffs.hand,
            kv_pools.format_of(args, server_args),
            with_draft=bool(args.num_draft_entries),
        )

    def teardown(self) -> None:
        """End this role: peers are told, and ports, files and threads given back. SGLang makes the
        other role's manager next, on the scheduler's thread, which is idle."""
        self.endpoint.close()
        self._zmq_ctx.destroy(linger=0)

    def weights_changed(self, update: WeightUpdate, *, memory_is_clean: bool) -> None:
        """End what is under way, and name the new weights. On the scheduler's thread, after they
        were replaced and before it does anything else."""
        assert self.handed is not None
        self.end_rooms(f"the weights of {self.server} {CHANGED}")
        self.handed.weights_changed(update, memory_is_clean=memory_is_clean)

    @property
    def server(self) -> str:
        """Where this server answers requests."""
        return shown_server(str(self.bootstrap_host), str(self.local_ip), get_serving().port)

    def rest(self) -> None:
        """Wait a moment for a room to move while this instance has nothing to compute. On the
        scheduler's thread, and only where polling would take a core from a computing process."""
        if self.endpoint.num_rooms:
            self._happened.wait(REST_S)
            self._happened.clear()

    def why_refused(self, room: int) -> str | None:
        """Why a new request may not have the room that a client named; None if it may. A room
        belongs to one request, from here until the endpoint has nothing more to say of it. On the
        scheduler's thread."""
        # A larger number ends prefill's scheduler, which writes it into a tensor, and no message
        # holds one beyond 64 bits.
        if not 0 <= room < NUM_ROOMS:
            return "the bootstrap_room of a request must be a number from 0 to 2^63 - 1"
        if room in self.request_status or room in self.leaving:
            return "this request is under way with this bootstrap_room; draw another number"
        return None

    # ``Listener``; the endpoint's thread.

    def room_done(self, room: int) -> None:
        self._conclude(room, KVPoll.Success)

    def room_failed(self, room: int, reason: str) -> None:
        self._conclude(room, KVPoll.Failed, reason)

    def room_dropped(self, room: int) -> None:
        """Forget what a late word left of an ended request, and give its room to others."""
        if room in self.leaving:
            self.request_status.pop(room, None)
            self.failure_records.pop(room, None)
            self.leaving.discard(room)

    def _conclude(self, room: int, status: int, reason: str | None = None) -> None:
        # A late failure must not bring back a room that SGLang has cleared.
        if room not in self.request_status:
            return
        if reason is not None:
            with self.failure_lock:
                self.failure_records.setdefault(room, reason)
        self.update_status(room, status)
        self._happened.set()

    def _on_tick(self, endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
        if self.handed is not None:
            self.handed.settle()
        if self.server_args.enable_metrics:
            self._handoffs.export(endpoint)

    def _keys(self, role: str) -> Keys | None:
        directory = self._transfer.keys_path
        return None if directory is None else load_keys(directory, role)


class PrefillKVManager(KVManagerRole):
    """The sending side of every handoff of one rank."""

    endpoint: PrefillEndpoint

    def __init__(self, handoffs: Handoffs, *of_sglang: Any) -> None:
        super().__init__(handoffs, *of_sglang)
        if self.system_dp_size > 1:  # the sender goes by a rank that is 0 in each of --dp-size
            self.attn_dp_rank = self.system_dp_rank
        self.handed = self._hand(self.endpoint.set_model)

    def end_rooms(self, reason: str) -> None:
        """Fail what is under way; the endpoint fails them before it takes another chunk."""
        self.endpoint.fail_rooms(reason)

    def register_to_bootstrap(self) -> None:
        """Listen, then announce where. SGLang's constructor calls this."""
        host = address_of(self.bootstrap_host)
        keys = self._keys("prefill")
        own = ip_address(host)
        if keys is None and not own.is_loopback:
            logger.warning(
                "KV transfer listens on %s without --transfer-keys; every host that reaches this "
                "port can read the KV of requests it opens. Make keys with "
                "sglang-tiered keygen, or close the network.",
                host,
            )
        self.endpoint = PrefillEndpoint(
            host=host,
            server=self.server,
            layout=kv_pools.layout_of(self, self._transfer.codec),
            memories=self._memories,
            rank=self._prefill_unique_rank(),
            listener=self,
            on_ready=self._room_ready,
            settings=self._transfer,
            keys=keys,
            on_tick=self._on_tick,
        )
        self.rank_port = self.endpoint.control_port
        if not own.is_unspecified:
            self.local_ip = host
        super().register_to_bootstrap()

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
        """Send pages that are computed, or will be when ``wait_event`` says so. With
        ``indices_event``, ``kv_indices`` is a host tensor of this call's own, filled by then."""
        if self.request_status.get(bootstrap_room) in (None, KVPoll.Failed):
            return
        if not isinstance(index_slice, slice):
            reason = "context-parallel prefill scatters pages, which zmq does not send"
            self._conclude(bootstrap_room, KVPoll.Failed, reason)
            return
        sends_metadata = aux_index is not None and self.pp_group.is_last_rank
        self.endpoint.send_chunk(
            bootstrap_room,
            Chunk(
                kv_pools.copied(kv_indices) if indices_event is None else kv_indices.numpy(),
                index_slice.start,
                is_last_chunk,
                [*map(kv_pools.copied, state_indices or ())],
                aux_index if sends_metadata else None,
                are_done(wait_event, indices_event),
            ),
        )

    # The endpoint's thread.

    def _room_ready(self, room: int, prefix_tokens: int) -> None:
        if room in self.request_status:
            self.req_to_decode_prefix_len[room] = prefix_tokens
            self.update_status(room, KVPoll.WaitingForInput)
            self._happened.set()

    def room_dropped(self, room: int) -> None:
        if room in self.leaving:
            self.req_to_decode_prefix_len.pop(room, None)
        super().room_dropped(room)


class DecodeKVManager(KVManagerRole):
    """The receiving side of every handoff of one rank."""

    endpoint: DecodeEndpoint
    _prefill_recompute_executor: Any  # SGLang's, once a request was computed again
    forward_stream: Any  # the scheduler's

    def __init__(self, handoffs: Handoffs, *of_sglang: Any) -> None:
        super().__init__(handoffs, *of_sglang)
        self.bootstrap_client = BootstrapClient(self, self.check_is_allowed)
        self.endpoint = DecodeEndpoint(
            server=self.server,
            layout=kv_pools.layout_of(self, self._transfer.codec),
            memories=self._memories,
            listener=self,
            on_lost=self._prefill_lost,
            settings=self._transfer,
            keys=self._keys("decode"),
            on_tick=self._on_tick,
        )
        self.handed = self._hand(lambda model, _: self.endpoint.set_model(model))

    def teardown(self) -> None:
        super().teardown()
        self.bootstrap_client.close()
        if self._prefill_recompute_executor is not None:
            self._prefill_recompute_executor.shutdown(wait=False)

    def end_rooms(self, reason: str) -> None:
        """Fail what is under way, and what was received that the scheduler has not taken."""
        for room in list(self.request_status):
            self.endpoint.close_room(room)
            self._conclude(room, KVPoll.Failed, reason)

    def check_is_allowed(self, host: str) -> None:
        """Raises ``TransferError`` for a prefill server that decode takes no KV from. Resolves
        names, so not on the scheduler's thread."""
        if self._transfer.keys_path is None or self._transfer.allowed_networks:
            for address in addresses_of(host):
                check_is_allowed(address, self._transfer.allowed_networks)

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        """Have prefill compute again what a pause took from a request."""
        super().submit_prefill_recompute(kv_receiver, payload | dict(kv_receiver.recompute))

    def _resolve_rank_mapping(self, info: Any) -> None:
        check_num_ranks(info)
        super()._resolve_rank_mapping(info)

    # The endpoint's thread.

    def _prefill_lost(self, address: Address, reason: str) -> None:
        """The rooms of a prefill rank have failed. Forget its servers: a successor has another
        port, and perhaps another layout."""
        for bootstrap_address in self.bootstrap_client.drop_servers_at(address):
            drop_connections(self, bootstrap_address)
            for room in list(self.addr_to_rooms_tracker.get(bootstrap_address, ())):
                # Rooms that are still without pages are unknown to the endpoint.
                if self.request_status.get(room) == KVPoll.WaitingForInput:
                    self._conclude(room, KVPoll.Failed, reason)


class _HandoffEnd:
    """What both ends of one request's handoff share. Before SGLang's class."""

    kv_mgr: Any
    bootstrap_room: int
    conclude_state: Any
    leave: Any
    asked = NOTHING_MORE
    _reason: str | None = None  # why it failed, once SGLang has asked

    def __init__(
        self,
        mgr: KVManagerRole,
        bootstrap_addr: str,
        bootstrap_room: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.named_room = bootstrap_room  # by the client, who is told of it whatever becomes of it
        reason = mgr.why_refused(bootstrap_room)
        if reason is not None:
            # A number of its own, so that its end touches no other request's room.
            bootstrap_room = next(_NO_ROOMS)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)  # type: ignore[call-arg]
        self.asked = mgr.arriving
        if reason is not None:
            self.kv_mgr.record_failure(self.bootstrap_room, reason)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed

    def clear(self) -> None:
        """Give the room back: SGLang asks no more of the request, or asks again and must not meet
        the next one of this number."""
        room = self.bootstrap_room
        with self.kv_mgr.failure_lock:
            self._reason = self._reason or self.kv_mgr.failure_records.pop(room, None)
        if self.conclude_state != KVPoll.Success:  # else all has been said of it
            self.kv_mgr.leaving.add(room)
        self.leave(room)
        super().clear()  # type: ignore[misc]
        self.bootstrap_room = next(_NO_ROOMS)

    def failure_exception(self) -> None:
        """Raises ``KVTransferError``, each time with the same reason: SGLang asks again while the
        request waits to be removed."""
        room = self.named_room
        self.conclude_state = KVPoll.Failed
        self.clear()
        if self._reason is not None:
            raise KVTransferError(room, self._reason)
        is_alone = self.kv_mgr.attn_tp_size * self.kv_mgr.pp_size == 1
        aborter = "this instance" if is_alone else "another rank of this instance"
        reason = f"the handoff was aborted by {aborter}; its log says why"
        raise KVTransferError(room, reason, is_from_another_rank=not is_alone)


class ZmqKVSender(_HandoffEnd, CommonKVSender):  # type: ignore[misc]
    """One request on one prefill rank."""

    kv_mgr: PrefillKVManager

    @property
    def supports_host_tensor_indices(self) -> bool:
        """Whether SGLang may hand over page numbers that a device is still writing, so that its
        scheduler does not wait for them. It asks CUDA for the event."""
        return self.kv_mgr.has_streams

    def __init__(self, mgr: PrefillKVManager, *args: Any, **kwargs: Any) -> None:
        super().__init__(mgr, *args, **kwargs)
        if self.conclude_state is None and not mgr.is_dummy_cp_rank:
            mgr.endpoint.expect_room(self.bootstrap_room, self.asked)

    def abort(self) -> None:
        """SGLang asks no more of a request that waited for its turn or was computed."""
        super().abort()
        self._reason = self._reason or "the request was aborted on prefill"
        self.clear()

    def leave(self, room: int) -> None:
        self.kv_mgr.endpoint.drop_room(room, self._reason or "prefill dropped the request")


class ZmqKVReceiver(_HandoffEnd, CommonKVReceiver):  # type: ignore[misc]
    """One request on one decode rank."""

    kv_mgr: DecodeKVManager
    bootstrap_infos: list[dict[str, Any]] | None = None
    looked_at: float | None = None  # when its prefill server was last looked for, and
    waited_s = 0.0  # for that until then

    def __init__(self, mgr: DecodeKVManager, *args: Any, **kwargs: Any) -> None:
        super().__init__(mgr, *args, **kwargs)
        self.recompute = mgr.recompute
        if self.conclude_state is not None:
            self.abort_notified = True  # prefill knows no such number

    @property
    def supports_host_destination(self) -> bool:
        return self.kv_mgr.host_memory is not None

    def is_abort_release_safe(self) -> bool:
        """Always true: ``abort`` and ``clear`` close the room, and a closed room is not written."""
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
        """Ask the prefill ranks for the request's pages, which are allocated now."""
        if self.bootstrap_infos is None:
            self._fail(f"the prefill server at {self.bootstrap_addr} is unknown")
            return
        to_host = destination == KVTransferDestination.HOST
        memory = self.kv_mgr.host_memory if to_host else None
        try:
            self.kv_mgr.endpoint.open_room(
                self.bootstrap_room,
                self._targets(),
                dummies={_address(info) for info in self.bootstrap_infos if info["is_dummy"]},
                pages=kv_pools.copied(kv_indices),
                state_rows=[*map(kv_pools.copied, state_indices or ())],
                aux_row=aux_index,
                prefix_tokens=decode_prefix_len or 0,
                num_receivers=self.required_dst_info_num,
                memory=memory,
                asked=self.asked,
                after=writes_so_far(self.kv_mgr.forward_stream),
            )
        except TransferError as error:
            self._fail(str(error))
            return
        self.init_time = time.time()

    def abort(self) -> None:
        self.kv_mgr.endpoint.close_room(self.bootstrap_room)
        super().abort()

    def leave(self, room: int) -> None:
        if self.init_time is None and not self.abort_notified:
            # It ended before it had pages, so prefill still waits for them.
            self.abort_notified = True
            if self.bootstrap_infos:
                self._send_abort_notification()
            else:
                abort_at = partial(self._abort_at, room)
                self.kv_mgr.bootstrap_client.call_with_ranks(self.bootstrap_addr, abort_at)
        self.kv_mgr.endpoint.close_room(room)

    def _clear(self) -> None:
        super()._clear()
        if not self.kv_mgr.addr_to_rooms_tracker.get(self.bootstrap_addr):
            self.kv_mgr.addr_to_rooms_tracker.pop(self.bootstrap_addr, None)  # clients name it

    def _fail(self, reason: str) -> None:
        self.kv_mgr.room_failed(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed

    def _targets(self) -> list[Address]:
        return [_address(info) for info in self.bootstrap_infos or ()]

    def init(self, prefill_dp_rank: int) -> None:
        """Tell the prefill ranks, which are known now, that this request is here."""
        self.kv_mgr.bootstrap_client.ensure_known(self.bootstrap_addr)
        if prefill_dp_rank < 0 and self.conclude_state is None:
            server = self.bootstrap_addr
            self._fail(f"the prefill server at {server} does not say which replica has the request")
        super().init(prefill_dp_rank)
        if self.conclude_state is None:
            self.kv_mgr.endpoint.claim_room(self.bootstrap_room, self._targets(), self.asked)

    def _register_kv_args(self) -> bool:
        """Does nothing: the session's Hello registers this rank, once per prefill server."""
        return True

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        key = (int(prefill_dp_rank), int(prefill_cp_rank), int(target_tp_rank), int(target_pp_rank))
        address = self.kv_mgr.bootstrap_client.rank_address(self.bootstrap_addr, key)
        if address is None:
            return None
        return {"rank_ip": address[0], "rank_port": address[1], "pp_rank": key[3]}

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        self._abort_at(self.bootstrap_room, self._targets())

    def _abort_at(self, room: int, ranks: list[Address]) -> None:
        reason = self._reason or self.kv_mgr.failure_records.get(room, "the request was aborted")
        self.kv_mgr.endpoint.abort_room(room, ranks, reason)


def _address(info: dict[str, Any]) -> Address:
    return info["rank_ip"], info["rank_port"]


CLASSES = {
    "sender": ZmqKVSender,
    "receiver": ZmqKVReceiver,
    "bootstrap_server": CommonKVBootstrapServer,
}
