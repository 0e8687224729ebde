"""Lending: one process has a store open, and gives the other ranks of its server pages of it.

It is the page protocol over a Unix socket in the shard (``LENDING``). Borrowers ask for all that
they want, and take pages only of a lender that takes the store for the same (``claim``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from typing import TYPE_CHECKING

from sglang_tiered.errors import StoreError, TransferError
from sglang_tiered.sharing.page_source import PageSource
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.settings import PageSettings
from sglang_tiered.storage.region.files import LENDING_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_tiered.storage.base import Job, Run

__all__ = ["SETTINGS", "LendingSocket", "PageLender", "namespace_of"]

SETTINGS = PageSettings(is_local=True, max_reads=8)
"""Of both sides."""


def namespace_of(claim: bytes | None) -> bytes:
    """Return the namespace in which pages are asked for; of no claim one that nobody else has."""
    return secrets.token_bytes(32) if claim is None else hashlib.sha256(claim).digest()


class LendingSocket:
    """Where the socket of a shard is, however deep that lies. Raises ``OSError``."""

    def __init__(self, shard: Path) -> None:
        self._fd = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = f"/proc/self/fd/{self._fd}/{LENDING_NAME}"
        self.address = f"ipc://{self.path}"

    def close(self) -> None:
        """Close the directory, and leave the file."""
        os.close(self._fd)


class PageLender:
    """Lends pages from construction to ``close``; the caller has the shard locked. ``submit``
    begins a load. Raises ``StoreError`` where nothing can listen in the shard."""

    def __init__(
        self,
        shard: Path,
        submit: Callable[[Run], Job],
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        self._claim: bytes | None = None
        self._source = PageSource(
            submit, max_free_bytes=SETTINGS.max_serving_bytes // 2, generation=generation
        )
        self._source.namespace = namespace_of(None)
        self._socket = LendingSocket(shard)
        try:
            self._server = PageServer(
                self._source,
                namespace=self._source.namespace,
                endpoint=self._socket.address,
                settings=SETTINGS,
            )
            self._source.share_loads(self._server.loop.call)
            os.chmod(self._socket.path, 0o600)
        except (TransferError, OSError) as error:
            self._socket.close()
            raise StoreError(
                f"{shard} takes no socket ({error}), by which ranks share its pages; pass another "
                "--tier-dir"
            ) from error
        self._is_closed = False

    @property
    def claim(self) -> bytes | None:
        """Return what the pages are taken to be. They go only to a borrower with the same claim,
        and to no borrower while it is None. The owner sets None before it changes what the engine
        finds, and the new claim afterwards."""
        return self._claim

    @claim.setter
    def claim(self, claim: bytes | None) -> None:
        self._claim = claim
        self._source.namespace = namespace_of(claim)
        self._server.set_namespace(self._source.namespace)

    def load(self, run: Run, submit: Callable[[Run], Job]) -> Job:
        """Begin a load of this process, whose pages go to borrowers too that ask for them before
        they are there. It ends once they have them, and has no other outcome."""
        return self._source.load(run, submit)

    def close(self) -> None:
        """Give nothing from now on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._source.share_loads(None)
        self._server.stop()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._socket.path)
        self._socket.close()
