"""Storages of servers, opened as their launcher and SGLang open them, without an SGLang around; and
weights of a model that take long to read, for what they do meanwhile."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
from host_pools import storage_config

from sglang_tiered.config import ENVIRONMENT_VARIABLE, NvmeConfig, TieredConfig, TierMode
from sglang_tiered.flags import MiB
from sglang_tiered.integration.identity import file_digests, namespace, namespace_search
from sglang_tiered.integration.identity.model import identify_model
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.remote_config import ObjectConfig
from sglang_tiered.storage.region.format import WEIGHTS_NAME

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


class Weights:
    """The weights of a model, which are read only while no other process has the turn."""

    def __init__(self, root: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root.mkdir()
        directory.mkdir()
        self._file = root / "model.safetensors"
        self._file.write_bytes(bytes(1 << 20))
        self._directory = directory
        self._held: int | None = None
        monkeypatch.setattr(
            namespace, "server_identity", lambda _: {"m": identify_model(str(root), None, "auto")}
        )
        monkeypatch.setattr(file_digests, "SETTLED_NS", -1)
        monkeypatch.setattr(namespace_search, "PATIENCE_S", 0.0)

    def take_long(self) -> None:
        self._held = os.open(self._directory, os.O_RDONLY)
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def are_read(self, storage: Any) -> None:
        self.let_go()
        deadline = time.monotonic() + 20.0
        while not storage.knows_namespace:
            assert time.monotonic() < deadline
            storage.settle_namespace()

    def are_forgotten(self) -> None:
        (self._directory / WEIGHTS_NAME).unlink()

    def are_fetched_anew(self, edit: bytes = b"") -> None:
        anew = self._file.with_suffix(".tmp")
        anew.write_bytes(self._file.read_bytes())
        with anew.open("r+b") as stream:
            stream.seek(8192)  # between two samples
            stream.write(edit)
        anew.replace(self._file)
