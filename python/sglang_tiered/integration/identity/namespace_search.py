"""``NamespaceSearch``: finds the namespace of this process without delaying its start.

The namespace is a digest of the bytes of the weights. If their digests are remembered it is known
at once, and weights of a few gigabytes are read in the time that a start may wait. Larger ones are
read on a thread while the server serves, with no page loaded and none stored. The tiers are open
meanwhile: under the namespace of the last weights that looked the same, which proves right unless a
few numbers were edited. Without any such weights, they are open under the last namespace found for
the shard. Its pages are indexed, and hidden until the answer confirms it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.flags import format_bytes
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.file_digests import FileDigests
from sglang_tiered.integration.identity.model import UNRESOLVED
from sglang_tiered.storage.region.format import NAMESPACE_BYTES, NAMESPACE_NAME, PAGE_SIZES_NAME
from sglang_tiered.storage.region.notes import note_of, with_page_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sglang_tiered.integration.identity.file_digests import SeenFile
    from sglang_tiered.storage.region.engine import RegionEngine
    from sglang_tiered.storage.region.notes import PageSize


PATIENCE_S = 2.0
"""The longest wait of a start for the weights."""

BACKGROUND_NICENESS = 10
JOIN_S = 1.0

logger = logging.getLogger(__name__)


class NamespaceSearch:
    """Finds the namespace; the scheduler thread reads its attributes.

    ``guess`` is the one to open the tiers under, None where there is none. While ``answer`` is None
    it may be another model's: no page of it may be used and none added. ``is_nameless`` says that
    no process will have the answer again. ``directory`` holds remembered digests. ``meanwhile``
    tells users what has to wait.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        pools: Mapping[str, Mapping[str, Any]],
        directory: Path,
        *,
        patience_s: float | None = None,
        meanwhile: str = "nothing is loaded from the tiers and nothing is stored",
    ) -> None:
        self._identity, self._pools = identity, pools
        self._digests = FileDigests(directory)
        self._stopped = threading.Event()
        self.answer: bytes | None = None
        self.guess: bytes | None = None
        self.is_nameless = False
        files = namespace.files_of(identity)
        known = self._digests.known(files)
        unknown = sorted(files - known.keys(), key=lambda file: file.path)
        if not unknown:
            self.answer = self.guess = self._conclude(known)
            return
        likely = self._digests.likely(unknown)
        self._thread = threading.Thread(
            target=self._run, args=(known, unknown), name="tier-weights", daemon=True
        )
        self._thread.start()
        self._thread.join(PATIENCE_S if patience_s is None else patience_s)
        self.guess = self.answer
        if self.guess is None:
            if len(likely) == len(unknown):
                self.guess = _digest(namespace.spell_out(identity, pools, known | likely))
            logger.warning(
                "reading %s of weights in the background, to identify them; until that is done %s",
                format_bytes(sum(file.stamp.num_bytes for file in unknown)),
                meanwhile,
            )

    def stop(self) -> None:
        """Stop reading: the answer is no longer needed."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and wait up to ``JOIN_S`` for the thread. Idempotent."""
        self.stop()
        if self.answer is None:
            self._thread.join(JOIN_S)

    def _conclude(self, digests: Mapping[SeenFile, bytes]) -> bytes:
        text = namespace.spell_out(self._identity, self._pools, digests)
        self.is_nameless = f'"{UNRESOLVED}' in text
        return _digest(text)

    def _run(self, known: dict[SeenFile, bytes], unknown: list[SeenFile]) -> None:
        # On Linux this is the thread's own priority: computing goes first.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
        begun = time.monotonic()
        try:
            found = self._digests.read(unknown, self._stopped)
            if self._stopped.is_set():
                return
            seconds = time.monotonic() - begun
            answer = self._conclude(known | found)
        except Exception:
            logger.exception(
                "internal error while reading weights; they count as no other server's"
            )
            self.is_nameless = True
            self.answer = namespace.successor(b"")
            return
        num_read = format_bytes(self._digests.num_bytes_read)
        logger.info("weights identified after %.1f s (%s read here)", seconds, num_read)
        self.answer = answer


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def recall_namespace(shard: Path) -> bytes:
    """Return the last namespace found for a shard, or a new one without pages."""
    found = unseal(note_of(shard, NAMESPACE_NAME), bytes)
    if found is None or len(found) != NAMESPACE_BYTES:
        return namespace.successor(b"")
    return found


def remember_namespace(region: RegionEngine, found: bytes, size: PageSize) -> None:
    """Save the namespace for the next start that must read its weights, and what its pages hold for
    who looks into the shard. Waits for the disk."""
    sizes = with_page_size(region.read_note(PAGE_SIZES_NAME), found, size)
    try:
        for name, data in ((NAMESPACE_NAME, seal(found)), (PAGE_SIZES_NAME, sizes)):
            if region.read_note(name) != data:
                region.write_note(name, data)
    except OSError as error:
        logger.warning(
            "%s or %s cannot be written (%s); the next start may have to read weights before it "
            "finds pages, and `store stat` may not count tokens",
            NAMESPACE_NAME,
            PAGE_SIZES_NAME,
            error.strerror,
        )
