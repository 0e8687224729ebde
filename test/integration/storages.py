"""Storages of servers, opened as their launcher and SGLang open them, without an SGLang around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from host_pools import storage_config

from sglang_tiered.config import ENVIRONMENT_VARIABLE, NvmeConfig, TieredConfig, TierMode
from sglang_tiered.flags import MiB
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.remote_config import ObjectConfig

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Storages:
    """Opens storages below a folder, and closes them all. What they are of is one model."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        self.opened: list[TieredStorage] = []
        patch.setattr(namespace, "server_identity", lambda _: {"model": "m"})
        self.configure()

    def configure(
        self, name: str = "kv", *, has_bucket: bool = False, nvme: Any = (), **settings: Any
    ) -> None:
        """Make this process one of a server with a tier directory of this name; all that have a
        bucket have the same."""
        sizes = {"capacity_bytes": 64 * MiB, "region_bytes": 4 * MiB, **dict(nvme)}
        if has_bucket:
            settings["object"] = ObjectConfig(url=(self._folder / "bucket").as_uri())
        config = TieredConfig(
            mode=TierMode.NVME,
            host_bytes=MiB,
            nvme=NvmeConfig(directory=str(self._folder / name), **sizes),
            **settings,
        )
        self._patch.setenv(ENVIRONMENT_VARIABLE, msgspec.json.encode(config).decode())

    def open(self, pool: Any, others: dict[Any, Any] | None = None, **rank: Any) -> Any:
        """Open the storage of a rank of the server that was configured last."""
        storage = TieredStorage(storage_config(**rank), {})
        self.opened.append(storage)
        storage.register_mem_pool_host(pool)
        for name, other in (others or {}).items():
            storage.register_mem_host_pool_v2(other, name)
        storage.on_host_pools_registered()
        return storage

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()
