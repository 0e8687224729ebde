"""``NamespaceSearch``: the namespace of this process, found without holding up its start.

The namespace digests the bytes of the weights. Where those are remembered it is known at once, and
weights of a few gigabytes are read in the time that a start may wait for. More is read on a thread
while the server serves, with no page loaded and none stored. The tiers are open meanwhile: under
the namespace of the last weights that looked the same, which is confirmed in the end unless
somebody edited a few numbers; if none did, under the last one that was found for the shard. What is
in it is indexed, and hidden until the answer confirms it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.config import format_bytes
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.file_digests import FileDigests
from sglang_tiered.integration.identity.model import contents_of, is_nameless, spell_out
from sglang_tiered.storage.region.files import NAMESPACE_NAME
from sglang_tiered.storage.region.format import NAMESPACE_BYTES
from sglang_tiered.storage.region.notes import read_note

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sglang_tiered.integration.identity.file_digests import SeenFile
    from sglang_tiered.storage.region.notes import Notes

__all__ = ["NamespaceSearch", "recall_namespace", "remember_namespace"]

PATIENCE_S = 2.0
"""How long a start waits."""

BACKGROUND_NICENESS = 10
JOIN_S = 1.0

logger = logging.getLogger(__name__)


class NamespaceSearch:
    """Scheduler thread. ``namespace`` is what to open the tiers under, None where nothing says; as
    long as ``answer`` is None it may be another model's, so nothing in it may be used and nothing
    added. ``is_nameless``: the answer is one that nobody will have again. ``directory`` is where
    digests are remembered."""

    def __init__(
        self,
        identity: Mapping[str, Any],
        pools: Mapping[str, Mapping[str, Any]],
        directory: Path,
        *,
        patience_s: float | None = None,
    ) -> None:
        self._identity, self._pools = identity, pools
        self._digests = FileDigests(directory)
        self._digests.recall()
        self._stopped = threading.Event()
        self.answer: bytes | None = None
        self.namespace: bytes | None = None
        self.is_nameless = False
        files = {file for contents in contents_of(identity) for _, file in contents.files}
        found = {file: self._digests.known(file) for file in files}
        known = {file: digest for file, digest in found.items() if digest is not None}
        unknown = sorted(files - known.keys(), key=lambda file: file.path)
        if not unknown:
            self.answer = self.namespace = self._conclude(known)
            return
        likely = {file: self._digests.likely(file) for file in unknown}
        self._thread = threading.Thread(
            target=self._run, args=(known, unknown), name="tier-weights", daemon=True
        )
        self._thread.start()
        self._thread.join(PATIENCE_S if patience_s is None else patience_s)
        if self.answer is not None:
            self.namespace = self.answer
            return
        looks = {file: digest for file, digest in likely.items() if digest is not None}
        if len(looks) == len(unknown):
            self.namespace = namespace.digest(spell_out(identity, known | looks), pools)
        logger.warning(
            "reading %s of weights in the background, to know them from others: nothing is loaded "
            "from the tiers and nothing stored until that is done",
            format_bytes(sum(file.stamp.num_bytes for file in unknown)),
        )

    def stop(self) -> None:
        """Read no more: nobody waits for the answer."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and wait a moment for the thread. Idempotent."""
        self.stop()
        if self.answer is None:
            self._thread.join(JOIN_S)

    def _conclude(self, digests: Mapping[SeenFile, bytes]) -> bytes:
        identity = spell_out(self._identity, digests)
        self.is_nameless = is_nameless(identity)
        return namespace.digest(identity, self._pools)

    def _run(self, known: dict[SeenFile, bytes], unknown: list[SeenFile]) -> None:
        with contextlib.suppress(
            OSError
        ):  # of this thread alone, on Linux: what computes goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
        begun = time.monotonic()
        try:
            found = self._digests.read(unknown, self._stopped)
            if self._stopped.is_set():
                return
            seconds = time.monotonic() - begun
            answer = self._conclude(known | found)
        except Exception:
            logger.exception("weights could not be read by our own fault; the tiers start anew")
            self.is_nameless = True
            self.answer = namespace.successor(b"")
            return
        num_read = format_bytes(self._digests.num_bytes_read)
        logger.info("weights known after %.1f s, %s of them read here", seconds, num_read)
        self.answer = answer


def recall_namespace(shard: Path) -> bytes:
    """The last one that was found for a shard, or one of which it holds nothing."""
    found = unseal(read_note(shard, NAMESPACE_NAME), bytes)
    if found is None or len(found) != NAMESPACE_BYTES:
        return namespace.successor(b"")
    return found


def remember_namespace(notes: Notes, found: bytes) -> None:
    """For the next start that must read its weights. Waits for the disk."""
    data = seal(found)
    if notes.read(NAMESPACE_NAME) == data:
        return
    try:
        notes.write(NAMESPACE_NAME, data)
    except OSError as error:
        logger.warning("%s cannot be written (%s)", NAMESPACE_NAME, error.strerror)
