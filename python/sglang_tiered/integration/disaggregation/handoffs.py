"""``Handoffs``: what outlives the KV manager of a scheduler, whose role may be switched.
``HandedModel`` and ``HandedAdapters`` say what the KV is of that a rank sends or takes.

SGLang makes another manager for the other role. The weights, which may have been replaced since the
start, the adapters and the series of metrics are the process's.

Weights do not change on disk alone: they are replaced while the server runs, and memory may hold KV
of those before. So what goes out or comes in is named anew with every change, and the rooms under
way end with it (``transfer``'s README, the model).
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_lora

from sglang_tiered.config import cache_directory
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.model import identify_model
from sglang_tiered.integration.identity.namespace_search import NamespaceSearch
from sglang_tiered.integration.observe.stats import MetricsExporter, transfer_stats
from sglang_tiered.metrics import TRANSFER_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.transfer.decode import DecodeEndpoint
    from sglang_tiered.transfer.prefill import PrefillEndpoint


logger = logging.getLogger(__name__)

MEANWHILE = "requests wait for it, since none is handed over"
ADAPTER_MEANWHILE = "requests of this adapter are refused by the other server"
UNKNOWN = "no file tells the weights of prefill"
REPLACED = "the weights of prefill were replaced while it ran"
STALE = "prefill still holds KV of the weights before; flush its cache"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What is known of new weights. ``path``: the files that were read, None where they came
    otherwise. ``is_complete``: all of them were replaced, and no more of them come in the same
    session."""

    path: str | None = None
    load_format: str | None = None
    is_complete: bool = False


def digests_directory(config: TieredConfig | None) -> Path:
    """The directory where digests of weights are remembered: the tiers', else the user's cache."""
    if config is not None and config.nvme is not None:
        return Path(config.nvme.directory)
    return cache_directory() / "sglang-tiered"


class HandedModel:
    """``tell`` takes the digest (None while it is not known) and a note for who is refused.

    ``settle`` is for the endpoint's thread, everything else for the scheduler's. ``identify``
    makes the identity of the weights as they were loaded."""

    def __init__(
        self,
        identify: Callable[[], Mapping[str, Any]],
        directory: Path,
        *,
        is_declared: bool,
        tell: Callable[[bytes | None, str], None],
    ) -> None:
        self._identify = identify
        self._directory = directory
        self._is_declared = is_declared
        self._tell = tell
        self._lock = threading.Lock()
        self._search: NamespaceSearch | None = None
        self._model: bytes | None = None
        self._note = ""
        self._is_stale = False
        self._complete: bytes | None = None  # the last model that was not replaced in part
        self._path_of_failed: str | None = None
        _make(directory)
        identity = identify()
        self._version: Any = identity.get("weight_version")
        self._look_for(identity, "")

    def settle(self) -> None:
        """Tell the digest once the weights have been read. Memory only."""
        with self._lock:
            search = self._search
            if search is None or search.answer is None:
                return
            self._search = None
            self._complete = search.answer
            self._know(search.answer, UNKNOWN if search.is_nameless else self._note)

    def tell_to(self, tell: Callable[[bytes | None, str], None]) -> None:
        """Tell another endpoint from now on, at once what is known: the role was switched. The
        thread of the one before has ended."""
        with self._lock:
            self._tell = tell
            if self._model is None:
                tell(None, "")
            else:
                self._know(self._model, self._note)

    def weights_changed(self, update: WeightUpdate, *, memory_is_clean: bool) -> None:
        """Name the new weights. End the rooms under way first. ``memory_is_clean``: no request
        matches KV of the weights before."""
        with self._lock:
            self._is_stale = not memory_is_clean
            if self._search is not None:
                self._search.stop()
                self._search = None
        identity = self._identity_after(update)
        if identity is None:
            with self._lock:
                self._know(namespace.successor(b""), REPLACED)
        else:
            self._look_for(identity, REPLACED)

    def _identity_after(self, update: WeightUpdate) -> Mapping[str, Any] | None:
        """None for weights that no other server can name."""
        if self._is_declared:
            identity = self._identify()
            version = identity["weight_version"]
            if not update.is_complete or version == self._version:
                return None
            self._version = version
            return identity
        before = self._complete
        is_mixed = self._path_of_failed not in (None, update.path)
        if update.path is None or before is None or is_mixed:
            self._complete = None
            return None
        if not update.is_complete:  # reading the same files again replaces what it replaced
            self._path_of_failed = update.path
            return None
        self._path_of_failed = None
        return namespace.updated_identity(before, update.path, update.load_format)

    def memory_was_flushed(self) -> None:
        """No KV of weights before is left."""
        with self._lock:
            was_stale, self._is_stale = self._is_stale, False
            if was_stale and self._model is not None:
                self._know(self._model, self._note)

    def close(self) -> None:
        """Stop reading."""
        if self._search is not None:
            self._search.stop()

    def _look_for(self, identity: Mapping[str, Any], note: str) -> None:
        search = NamespaceSearch(identity, {}, self._directory, patience_s=0.0, meanwhile=MEANWHILE)
        with self._lock:
            self._search, self._model, self._note = search, None, note
            self._complete = None
            self._tell(None, "")
        self.settle()

    def _know(self, model: bytes, note: str) -> None:
        self._model, self._note = model, note
        if self._is_stale:
            self._tell(namespace.successor(model), STALE)
        else:
            self._tell(model, note)


class HandedAdapters:
    """What tells apart LoRA adapters, by SGLang's ids. The scheduler's thread only.

    An adapter belongs to the requests that name it, by the bytes of its files: each server gives it
    an id of its own, and may have it elsewhere."""

    def __init__(self, directory: Path, at_start: Iterable[Any] | None = None) -> None:
        """``directory`` holds remembered digests. ``at_start``: those of ``--lora-paths``."""
        _make(directory)
        self._directory = directory
        self._known: dict[str, tuple[str, NamespaceSearch | None]] = {}  # names, digests
        for adapter in at_start or ():
            self.note_loaded(adapter.lora_id, adapter.lora_path, adapter.lora_name)

    def note_loaded(self, lora_id: str, path: str | None, name: str) -> None:
        """Read the files of an adapter, on a thread. Without ``path`` it came from tensors, and has
        no equal. ``name``: by which requests ask for it, on every server."""
        search = None
        if path is not None:
            identity = {"adapter": identify_model(path, None, "auto")}
            search = NamespaceSearch(
                identity, {}, self._directory, patience_s=0.0, meanwhile=ADAPTER_MEANWHILE
            )
        self._known[lora_id] = name, search

    def note_unloaded(self, lora_id: str) -> None:
        _, search = self._known.pop(lora_id, ("", None))
        if search is not None:
            search.stop()

    def digest_of(self, lora_id: str | None) -> bytes:
        """Return the digest of a request's adapter, empty without one. What is not known yet has a
        digest that nobody else has."""
        if lora_id is None:
            return b""
        _, search = self._known.get(lora_id, ("", None))
        answer = None if search is None else search.answer
        return namespace.successor(b"") if answer is None else answer

    def name_of(self, lora_id: str | None) -> str | None:
        """Return by which name another server is asked for an adapter; None without one."""
        return self._known[lora_id][0] if lora_id in self._known else None


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning(
            "%s cannot be made (%s); weights are read again at every start", directory, error
        )


class Handoffs:
    """Of one scheduler, which has one manager at a time."""

    def __init__(self, config: TieredConfig | None) -> None:
        self.config = config
        self._handed: HandedModel | None = None
        self._exporter: MetricsExporter | None = None
        self._exported: PrefillEndpoint | DecodeEndpoint | None = None

    @cached_property
    def adapters(self) -> HandedAdapters:
        """Return what tells LoRA adapters apart."""
        return HandedAdapters(digests_directory(self.config), get_lora().lora_paths)

    def hand(
        self, kv_format: str, tell: Callable[[bytes | None, str], None], *, with_draft: bool
    ) -> HandedModel:
        """Return what is known of the weights, which ``tell`` hears of from now on."""
        if self._handed is not None:
            self._handed.tell_to(tell)
            return self._handed
        transfer = None if self.config is None else self.config.transfer
        name = None if transfer is None else transfer.model_name
        identify = partial(namespace.handoff_identity, name, kv_format, with_draft=with_draft)
        self._handed = HandedModel(
            identify, digests_directory(self.config), is_declared=name is not None, tell=tell
        )
        return self._handed

    def export(self, endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
        """Publish what an endpoint counted, on its thread; there is one at a time."""
        if self._exported is not endpoint:
            self._exported, read = endpoint, partial(transfer_stats, endpoint)
            if self._exporter is None:
                self._exporter = MetricsExporter(read, metrics=TRANSFER_METRICS)
            else:
                self._exporter.read_from(read)
        assert self._exporter is not None
        self._exporter.export()
