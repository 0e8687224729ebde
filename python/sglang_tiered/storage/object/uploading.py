"""Objects into the bucket: the object first, then its manifest, and only then a hit."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.object.failures import RequestError
from sglang_tiered.storage.object.format import (
    NO_CODEC,
    Manifest,
    pack_manifest,
    pack_tail,
    page_table,
)
from sglang_tiered.storage.object.names import Layout

if TYPE_CHECKING:
    from sglang_tiered.storage.object.breaker import Breaker
    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.object.pending import OpenObject
    from sglang_tiered.storage.object.state import ObjectState, OnFault

__all__ = ["Uploader"]


class Uploader:
    """Uploads objects; ``run`` is the body of the uploading threads."""

    def __init__(
        self, state: ObjectState, client: ObjectClient, breaker: Breaker, on_fault: OnFault
    ) -> None:
        self._state = state
        self._client = client
        self._breaker = breaker
        self._on_fault = on_fault

    def run(self) -> None:
        state = self._state
        while True:
            with state.lock:
                while not state.uploads and not state.closed:
                    state.upload_ready.wait()
                if not state.uploads:
                    return
                open_object = state.uploads.popleft()
                state.uploading[open_object] = None
            try:
                self._upload(open_object)
            except BaseException:  # a panic of the library is no Exception
                self._on_fault("uploading")
                with state.lock:
                    state.settle(open_object, Reason.IO_ERROR)
            with state.lock:
                del state.uploading[open_object]
                state.upload_done.notify_all()
            del open_object  # its memory goes now, not with the next one

    def _upload(self, open_object: OpenObject) -> None:
        """Upload and settle. Reasons: OK, IO_ERROR, REJECTED while stores pause, CANCELLED when
        its pages were erased."""
        state = self._state
        manifest = Manifest(
            open_object.object_id,
            open_object.namespace,
            open_object.tenant,
            NO_CODEC if state.codec is None else state.codec.name,
            page_table(open_object.rows),
            len(open_object.buffer),
        )
        reason = self._write(open_object, manifest)
        with state.lock:
            if open_object.dropped:
                reason = Reason.CANCELLED
            elif reason is Reason.OK:
                state.num_objects_stored += 1
                state.num_pages_stored += len(open_object.entries)
                state.bytes_stored += manifest.num_bytes
                if open_object.epoch == state.epoch:
                    state.learn(manifest)
            state.settle(open_object, reason)

    def _write(self, open_object: OpenObject, manifest: Manifest) -> Reason:
        state = self._state
        layout = Layout(open_object.namespace)
        packed = pack_manifest(manifest)
        open_object.buffer += packed
        open_object.buffer += pack_tail(len(open_object.rows))
        if open_object.dropped:
            return Reason.CANCELLED
        if not self._breaker.accepts_stores():
            return Reason.REJECTED
        num_written = 0
        try:
            self._client.put(layout.object(open_object.object_id), open_object.buffer)
            num_written += len(open_object.buffer)
            # Without its manifest an object is an orphan: the collector takes it.
            if not open_object.dropped:
                self._client.put(layout.manifest(open_object.object_id), packed)
                num_written += len(packed)
            if open_object.dropped:  # erased meanwhile
                with contextlib.suppress(RequestError):
                    self._client.delete([layout.manifest(open_object.object_id)])
                    self._client.delete([layout.object(open_object.object_id)])
                return Reason.CANCELLED
        except RequestError:
            self._breaker.store_failed()
            return Reason.IO_ERROR
        finally:
            with state.lock:
                state.bytes_written += num_written
                state.write_budget.spend(num_written)
                state.request_budget.spend(self._client.num_puts(len(open_object.buffer)) + 1)
        self._breaker.store_succeeded()
        return Reason.OK
