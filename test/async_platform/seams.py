"""Where SGLang and sglang-tiered are wrapped, right after each module was executed.

Every seam asserts that what it wraps exists, and tells the report that it ran. Whoever writes host
pages needs one, or its pages count as never copied. Forwards have a module of their own.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import device as streams
import numpy as np
from books import DeviceSlots, HostPages, check_aligned
from device import Delays, Device
from report import Report
from rest import Rest

if TYPE_CHECKING:
    import torch

CHUNK_PAGES = 8
"""A copy to host memory moves so many pages at a time, so that half of one can be seen."""


class Bed:
    """The platform of this process: its settings, device and report."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.report = Report()
        self.device = Device(report=self.report.violation)
        self.rest = Rest(self.report)
        self.reread(environment)

    def reread(self, environment: Mapping[str, str]) -> None:
        """Of a process that was forked: its own files and delays."""
        self.report.path = environment.get("ASYNC_PLATFORM_REPORT")
        self.rest.orders = environment.get("ASYNC_PLATFORM_DRAIN")
        self.device.delays = Delays(
            seed=int(environment.get("ASYNC_PLATFORM_SEED", "0")),
            mode=environment.get("ASYNC_PLATFORM_MODE", "random"),
            horizon_s=float(environment.get("ASYNC_PLATFORM_HORIZON_S", "0.15")),
        )


BED = Bed(os.environ)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Call ``around(original, *given)`` in the place of what the owner itself defines."""
    original = vars(owner).get(name)
    assert original is not None, f"{owner} has no {name}: the asynchronous platform must follow"

    @functools.wraps(original)
    def wrapped(*given: Any, **named: Any) -> Any:
        return around(original, *given, **named)

    setattr(owner, name, wrapped)


def wrapping(owner: Any) -> Callable[[Callable[..., Any]], None]:
    """``wrap`` by the name of what is decorated."""
    return lambda around: wrap(owner, around.__name__, around)


_HOST, _DEVICE = "_async_platform_pages", "_async_platform_slots"


class Kept:
    """A book, of which one call is made at a time; of a pool that has none, nothing happens."""

    def __init__(self, book: Any) -> None:
        self._book = book

    def __bool__(self) -> bool:
        return self._book is not None

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            with BED.device.lock:
                return None if self._book is None else getattr(self._book, name)(*given)

        return call


def pages_of(pool: Any) -> Any:
    """The books of a host pool."""
    return Kept(vars(pool).get(_HOST) if hasattr(pool, "__dict__") else None)


def slots_of(pool: Any, *, page_size: int | None = None) -> DeviceSlots | None:
    """The books of a device pool; begun here by who knows its page size."""
    if pool is None or not hasattr(pool, "__dict__"):
        return None
    pool = getattr(pool, "full_kv_pool", pool)
    book: DeviceSlots | None = vars(pool).get(_DEVICE)
    if book is None and page_size is not None:
        made = DeviceSlots(pool, BED.device, BED.report, page_size)
        if made.number:
            book = vars(pool)[_DEVICE] = made
    return book


class Deferred:
    """A host pool whose copies are queued on the current stream. The host's indices are taken at
    the call, as CUDA stages them; the device's are read when a copy runs."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def backup_from_device_all_layer_physical(
        self, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
    ) -> None:
        import torch

        BED.report.ran("d2h")
        pool, host_indices, stream = self._pool, host_indices.clone(), streams.current_stream()
        pages, slots = pages_of(pool), Kept(slots_of(device_pool))

        def end() -> None:
            pages.end_write(host_indices)
            slots.end_copy_out(device_indices)

        def move(host: torch.Tensor, device: torch.Tensor) -> None:
            with torch.inference_mode():
                pool.backup_from_device_all_layer_physical(device_pool, host, device, io_backend)

        with BED.device.lock:
            pages.begin_write(host_indices, "d2h")
            slots.begin_copy_out(device_indices, stream)
            size = CHUNK_PAGES * int(getattr(pool, "logical_page_size", pool.page_size))
            chunks = list(zip(host_indices.split(size), device_indices.split(size), strict=True))
            draw = functools.partial(BED.device.delays.number, stream.end)
            order = sorted(range(len(chunks)), key=lambda number: (draw(number), number))
            for number in order:
                last = end if number == order[-1] else None
                stream.copy(functools.partial(move, *chunks[number]), "d2h", last)

    def load_to_device_per_layer_physical(
        self, device_pool: Any, host_indices: Any, device_indices: Any, *where: Any, **named: Any
    ) -> None:
        import torch

        BED.report.ran("h2d")
        pool, host_indices, stream = self._pool, host_indices.clone(), streams.current_stream()
        pages, slots = pages_of(pool), Kept(slots_of(device_pool))
        given = (device_pool, host_indices, device_indices, *where)

        def move() -> None:
            with torch.inference_mode():
                pool.load_to_device_per_layer_physical(*given, **named)

        with BED.device.lock:
            pages.begin_read(host_indices, "h2d")
            slots.begin_copy_in(device_indices, stream)
            index = stream.copy(move, "h2d of a layer", lambda: pages.end_read(host_indices))
            slots.copied_in(device_indices, stream, index)


def _transfers(module: ModuleType) -> None:
    engine = module.L2TransferEngine

    @wrapping(engine)
    def __init__(original: Any, self: Any, io_backend: str) -> None:
        original(self, io_backend)
        self.device_to_host_stream.called("d2h", lazy=True)
        self.host_to_device_stream.called("h2d", lazy=True)

    @wrapping(engine)
    def _prepare_transfers(original: Any, self: Any, transfers: list[Any]) -> list[Any]:
        prepared = original(self, transfers)
        for one in prepared:
            page_size = int(one.host_pool.page_size)
            if one.host_pool.layout == "page_first_direct":
                for indices in (one.host_indices, one.device_indices):
                    check_aligned(BED.report, type(one.host_pool).__name__, indices, page_size)
        return [one._replace(host_pool=Deferred(one.host_pool)) for one in prepared]


def _host_pools(module: ModuleType) -> None:
    _watch_pages(module.HostKVCache)

    @wrapping(module.HostKVCache)
    def destroy(original: Any, self: Any) -> Any:
        BED.device.synchronize()
        return original(self)


def _watch_pages(pool_class: Any) -> None:
    @wrapping(pool_class)
    def alloc(original: Any, self: Any, need_size: int) -> Any:
        indices, book = original(self, need_size), pages_of(self)
        if book and indices is not None and len(indices):
            BED.report.ran("host-alloc")
            book.allocated(indices)
        return indices

    @wrapping(pool_class)
    def free(original: Any, self: Any, indices: torch.Tensor) -> Any:
        book = pages_of(self)
        if book and len(indices):
            BED.report.ran("host-free")
            book.freed(indices)
        return original(self, indices)

    @wrapping(pool_class)
    def clear(original: Any, self: Any) -> None:
        book = pages_of(self)
        book.cleared()
        original(self)
        has_memory = getattr(self, "kv_buffer", None) is not None
        if not book and has_memory and self.shared_allocation_domain is None:
            vars(self)[_HOST] = HostPages(self, BED.report)


def _paged_allocator(module: ModuleType) -> None:
    @wrapping(module.PagedTokenToKVPoolAllocator)
    def _release_page_ids(original: Any, self: Any, *page_ids: torch.Tensor) -> None:
        book = Kept(slots_of(self.get_kvcache(), page_size=self.page_size))
        for pages in page_ids if book else ():
            BED.report.ran("device-free")
            first = pages.cpu().numpy()[:, None] * self.page_size
            book.freed((first + np.arange(self.page_size)).reshape(-1))
        original(self, *page_ids)

    _watch_clear(module.PagedTokenToKVPoolAllocator)


def _token_allocator(module: ModuleType) -> None:
    @wrapping(module.TokenToKVPoolAllocator)
    def free(original: Any, self: Any, free_index: torch.Tensor) -> None:
        book = Kept(slots_of(self.get_kvcache(), page_size=1))
        if book and self.free_group is None and free_index.numel():
            BED.report.ran("device-free")
            book.freed(free_index.cpu().numpy())
        original(self, free_index)

    _watch_clear(module.TokenToKVPoolAllocator)


def _watch_clear(allocator_class: Any) -> None:
    @wrapping(allocator_class)
    def clear(original: Any, self: Any) -> None:
        Kept(slots_of(self.get_kvcache(), page_size=self.page_size)).cleared()
        original(self)


def _storage(module: ModuleType) -> None:
    before: dict[Any, tuple[Any, Any]] = {}  # books and checksums of what is under way

    @wrapping(module.TieredStorage)
    def begin_store(
        original: Any, self: Any, pool: Any, hashes: Any, host_indices: torch.Tensor, store: Any
    ) -> Any:
        book = pages_of(self._pool(pool))
        if book:
            BED.report.ran("store")
        checksums = book.begin_store(host_indices)
        try:
            begun = original(self, pool, hashes, host_indices, store)
        except BaseException:
            book.end_store(host_indices, checksums)
            raise
        before[begun] = book, checksums
        return begun

    @wrapping(module.TieredStorage)
    def end_store(original: Any, self: Any, begun: Any) -> Any:
        book, checksums = before.pop(begun, (Kept(None), None))
        try:
            return original(self, begun)
        finally:
            book.end_store(begun.host_indices, checksums)

    @wrapping(module.TieredStorage)
    def begin_load(
        original: Any, self: Any, pool: Any, hashes: Any, host_indices: torch.Tensor, **named: Any
    ) -> Any:
        book, size = pages_of(self._pool(pool)), len(host_indices) // max(1, len(hashes))
        if book:
            BED.report.ran("load")
        book.begin_write(host_indices, "load")

        def note_end(job: Any) -> None:
            with BED.device.lock:
                book.end_write(host_indices)
                for page, is_there in zip(host_indices.split(size), job.ok, strict=True):
                    if not is_there:
                        book.not_written(page)

        job = original(self, pool, hashes, host_indices, **named)
        job.call_at_end(note_end)
        return job


def _torch_cpu(module: ModuleType) -> None:
    for name in ("Stream", "Event", "StreamContext", "stream", "current_stream", "synchronize"):
        assert hasattr(module, name), f"torch.cpu has no {name}"
    streams.install(module, BED.device)


def _scheduler(module: ModuleType) -> None:
    @wrapping(module.Scheduler)
    def init_overlap(original: Any, self: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        BED.report.ran("scheduler")
        BED.device.rank = int(get_parallel().tp_rank or 0)
        original(self)
        self.copy_stream.called("results", lazy=True)

    @wrapping(module.Scheduler)
    def on_idle(original: Any, self: Any) -> None:
        original(self)
        BED.rest.look(self)


class _Over:
    """A module with some attributes changed."""

    def __init__(self, module: Any, **changed: Any) -> None:
        vars(self).update(changed)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _disaggregation_prefill(module: ModuleType) -> None:
    """Give SGLang, which asks CUDA for events by name, ours: a cached prefix can be sent early."""
    cuda = _Over(module.torch.cuda, Event=streams.Event, current_stream=streams.current_stream)
    module.torch = _Over(module.torch, cuda=cuda)


_RECEIVED_INTO, _RECEIVING = "_async_platform_pools", "_async_platform_rooms"


def _disaggregation_decode(module: ModuleType) -> None:
    """The receiver is told page numbers, and the queue knows of which pools."""

    @wrapping(module.DecodePreallocQueue)
    def _pre_alloc_host(original: Any, self: Any, decode_req: Any) -> Any:
        pools = (self.host_pool, getattr(self, "host_swa_pool", None))
        setattr(decode_req.kv_receiver, _RECEIVED_INTO, pools)
        return original(self, decode_req)


def _handoff(module: ModuleType) -> None:
    """A room writes its host pages from when it is opened until it is received, fails or closes."""

    def end(manager: Any, room: int, *, is_received: bool) -> None:
        with BED.device.lock:
            for book, slots in vars(manager).get(_RECEIVING, {}).pop(room, ()):
                book.end_write(slots)
                if not is_received:
                    book.not_written(slots)

    @wrapping(module.ZmqKVReceiver)
    def send_metadata(original: Any, self: Any, *given: Any, **named: Any) -> None:
        import torch

        asked = inspect.signature(original).bind(self, *given, **named).arguments
        is_host = asked.get("destination") == module.KVTransferDestination.HOST
        into = getattr(self, _RECEIVED_INTO) if is_host else ()
        rows = (asked["kv_indices"], *(asked.get("state_indices") or ()))
        writes = []
        for pool, pages in zip(into, rows, strict=False):
            if pages_of(pool) and len(pages):
                numbers = torch.from_numpy(np.array(pages, np.int64))
                size = int(pool.logical_page_size)
                slots = (numbers[:, None] * size + torch.arange(size)).reshape(-1)
                writes.append((pages_of(pool), slots))
        if writes:
            BED.report.ran("receive")
            with BED.device.lock:
                vars(self.kv_mgr).setdefault(_RECEIVING, {})[self.bootstrap_room] = writes
                for book, slots in writes:
                    book.begin_write(slots, "receive")
        original(self, *given, **named)

    @wrapping(module.KVManagerRole)
    def _conclude(
        original: Any, self: Any, room: int, status: int, *why: Any, **named: Any
    ) -> None:
        end(self, room, is_received=status == module.KVPoll.Success)
        original(self, room, status, *why, **named)

    def close(original: Any, self: Any) -> None:
        original(self)
        end(self.kv_mgr, self.bootstrap_room, is_received=False)

    wrap(module.ZmqKVReceiver, "abort", close)
    wrap(module.ZmqKVReceiver, "_clear", close)


def _model_runner(module: ModuleType) -> None:
    import forwards

    late = forwards.late(BED, slots_of)
    wrap(module.ModelRunner, "forward", lambda original, *given, **n: late(original)(*given, **n))


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch.cpu": _torch_cpu,
    "sglang.srt.mem_cache.l2_transfer": _transfers,
    "sglang.srt.mem_cache.pool_host.base": _host_pools,
    "sglang.srt.mem_cache.pool_host.mamba": lambda module: _watch_pages(module.MambaPoolHost),
    "sglang.srt.mem_cache.allocator.paged": _paged_allocator,
    "sglang.srt.mem_cache.allocator.token": _token_allocator,
    "sglang.srt.managers.scheduler": _scheduler,
    "sglang.srt.model_executor.model_runner": _model_runner,
    "sglang.srt.disaggregation.prefill": _disaggregation_prefill,
    "sglang.srt.disaggregation.decode": _disaggregation_decode,
    "sglang_tiered.integration.disaggregation.manager": _handoff,
    "sglang_tiered.integration.storage.backend": _storage,
}
