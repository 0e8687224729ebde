"""Mooncake's transfer engine over TCP, driven as SGLang's Mooncake backend drives it.

Optional: package ``mooncake-transfer-engine-non-cuda``, whose library also wants the system's
``libibverbs.so.1``, though nothing here is RDMA. One batch per prompt, one transfer per page and
buffer: the pages are scattered on both sides, so none can be joined to the next. The engine writes
into the other process's memory; it checks and encrypts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_bench.pools import Pool


MODULE = "mooncake.engine"
HOST = "127.0.0.1"


def why_not(module: str = MODULE) -> str:
    """Why it cannot run here, in one line; empty where it can."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return ""


class MooncakeEnd:
    """One process's engine, with its pool registered. Raises ``RuntimeError`` if it refuses."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._engine: Any = importlib.import_module(MODULE).TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's engine did not start")
        if self._engine.register_memory(self.base, pool.array.nbytes):
            raise RuntimeError("Mooncake's engine did not take the pool")

    @property
    def base(self) -> int:
        """Where the pool lies in this process."""
        return int(self._pool.array.ctypes.data)

    @property
    def session(self) -> str:
        """What the other end calls this one."""
        return f"{HOST}:{self._engine.get_rpc_port()}"

    def write(self, session: str, base: int, pages: Any, destinations: Any) -> None:
        """These pages of every buffer into those of the other end; returns when all are there."""
        shape = self._pool.shape
        buffer_bytes = shape.num_pages * shape.page_bytes
        starts = [index * buffer_bytes for index in range(2 * shape.num_layers)]
        sources, targets = (
            [origin + start + int(page) * shape.page_bytes for start in starts for page in chosen]
            for origin, chosen in ((self.base, pages), (base, destinations))
        )
        lengths = [shape.page_bytes] * len(sources)
        if self._engine.batch_transfer_sync_write(session, sources, targets, lengths):
            raise RuntimeError("Mooncake's engine did not write a prompt")
