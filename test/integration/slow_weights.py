"""Weights of a model that take long to read, for tests of what a storage does meanwhile."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Any

from sglang_tiered.integration.identity import file_digests, namespace, namespace_search
from sglang_tiered.integration.identity.model import identify_model
from sglang_tiered.storage.region.format import WEIGHTS_NAME

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TIMEOUT_S = 20.0


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
        deadline = time.monotonic() + TIMEOUT_S
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
