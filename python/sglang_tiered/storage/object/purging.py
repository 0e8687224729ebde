"""How tenants are purged on order: hidden in memory at once, then gone from the bucket.

A purge is known to other servers by its tombstone, which says up to when objects of the tenant are
dead; it is written first, then manifests and objects are deleted. A purge of a tenant is of every
namespace under the prefix, a purge of everyone of the engine's own. ``Purger`` makes what was
forgotten page by page (``forgetting``) durable too, in every namespace.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import NO_TENANT, Erasure, JobKind
from sglang_tiered.storage.object.dropping import drop_stores
from sglang_tiered.storage.object.failures import Failure, RequestError
from sglang_tiered.storage.object.forgetting import apply_forget, bound_of_pages, note
from sglang_tiered.storage.object.format import (
    MAX_FORGOTTEN_PAGES,
    Purge,
    pack_purge,
    unpack_manifest,
)
from sglang_tiered.storage.object.names import (
    ROOT,
    Layout,
    ObjectId,
    namespace_of,
    parse_path,
    tenant_tag,
)
from sglang_tiered.storage.object.pending import PurgeOrder
from sglang_tiered.storage.promises import all_true, ended, is_true, keep

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.object.state import ObjectState

__all__ = ["Purger", "apply_remote_purge", "erase"]

logger = logging.getLogger(__name__)

_MAX_SKEW_MS = 60_000
_MIN_AHEAD_MS = 50_000  # of the bound of a forget when its tombstone is written
_SWEPT_ROWS = 1 << 16
_DELETED_AT_ONCE = 1000
_MAX_READ = 256  # objects that a forget looks into; the collector finds the rest
_LOCAL_S = 10.0


def erase(state: ObjectState, what: Erasure, local: Future[bool] | None) -> Future[bool]:
    """Hide pages; with ``spread`` the discovery thread makes it durable, for every server, by
    orders ahead of its reads. Memory only."""
    with state.lock:
        if state.closed:
            return ended(what.is_empty)
        if not what.spread:
            _hide_here(state, what)
            return ended(True)
        orders = _erase_pages(state, what.keys) if what.keys is not None else [_purge(state, what)]
        for order in orders:
            order.local = local
        state.purge_orders.extend(orders)
        state.discovery_ready.notify_all()
        gone = frozenset(what.keys or ())
        jobs = [job for job in state.jobs.inflight if _concerns(job, what, gone)]
    return state.promises.watch(all_true([order.durable for order in orders], jobs))


def _concerns(job: Job, what: Erasure, gone: frozenset[bytes]) -> bool:
    """Return whether what is erased must wait for a job. A store may go on for its other pages, of
    which an object waits to be full."""
    if what.keys is not None:
        return job.kind is JobKind.LOAD and not gone.isdisjoint(job.run.keys)
    return job.kind is JobKind.LOAD or what.tenant in (None, job.run.tenant)


def _hide_here(state: ObjectState, what: Erasure) -> None:
    """Hide what another server makes durable; but what the owner is told of is hidden already, no
    further than its tombstone says."""
    if what.keys is None:
        if what.tenant not in state.barred:
            _hide(state, what.tenant)
    elif keys := [key for key in what.keys if key not in state.barred]:
        apply_forget(state, keys, bound_of_pages(state, keys))


def _purge(state: ObjectState, what: Erasure) -> PurgeOrder:
    tag = 0 if what.tenant is None else tenant_tag(what.tenant)
    bound = _hide(state, what.tenant)
    purge_id = state.next_id(NO_TENANT)._replace(unix_ms=bound, tenant_tag=tag)
    return PurgeOrder(what.tenant, purge_id, state.namespace, state.promises.make())


def _erase_pages(state: ObjectState, keys: Sequence[bytes]) -> list[PurgeOrder]:
    gone = set(keys)
    names = state.index.names_of(keys)
    uploading = [o for o in state.uploading if any(row[0] in gone for row in o.rows)]
    bound = bound_of_pages(state, keys)
    apply_forget(state, keys, bound)
    orders = [
        PurgeOrder(
            None,
            state.next_id(NO_TENANT)._replace(unix_ms=bound, tenant_tag=0),
            state.namespace,
            state.promises.make(),
            tuple(keys[start : start + MAX_FORGOTTEN_PAGES]),
        )
        for start in range(0, len(keys), MAX_FORGOTTEN_PAGES)
    ]
    for order in orders[-1:]:
        order.names, order.uploading = names, uploading
    return orders


def _hide(state: ObjectState, tenant: bytes | None) -> int:
    """Hide pages; returns up to when their objects are dead. The caller holds the lock."""
    newest = state.index.newest_ms(tenant)  # by another server's clock, where this one is behind
    bound = max(state.now_ms(), state.bounds.of(tenant) + 1, newest)
    state.bounds.add(tenant, bound)
    state.pins.purge(tenant, bound)
    drop_stores(state, tenant, None)
    index = state.index
    state.num_pages_erased += index.clear() if tenant is None else index.drop_tenant(tenant)
    return bound


def apply_remote_purge(state: ObjectState, purge: Purge) -> None:
    """Hide what another server purged. The caller holds the state's lock."""
    if not state.bounds.add(purge.tenant, purge.bound_ms):
        return
    state.pins.purge(purge.tenant, purge.bound_ms)
    # What an owner has stored since may be what its other tiers had before.
    drop_stores(state, purge.tenant, purge.bound_ms if state.on_erased is None else None)
    state.num_pages_erased += state.index.drop_before(purge.tenant, purge.bound_ms)


class Purger:
    """Makes purges durable, on the discovery thread. A failed purge is tried again."""

    def __init__(self, state: ObjectState, client: ObjectClient) -> None:
        self._state = state
        self._client = client
        self._unfinished: dict[bytes | tuple[bytes, ...] | None, PurgeOrder] = {}

    def serve(self, order: PurgeOrder) -> None:
        durable = False
        try:
            self.sweep()
            self._await_uploads(order)
            self._make_durable(order)
        except RequestError:
            self._unfinished[_what(order)] = order
        except BaseException:  # a panic of the library is no Exception
            logger.exception("internal error while purging; the purge is tried again")
            self._unfinished[_what(order)] = order
        else:
            self._unfinished.pop(_what(order), None)
            durable = True
        keep(order.durable, durable)

    def retry(self) -> None:
        """Try again what failed, whether or not anybody asks again."""
        for order in list(self._unfinished.values()):
            self.serve(order)

    def sweep(self) -> None:
        """Remove hidden pages from the index, with the lock let go in between."""
        state = self._state
        done = False
        while not done:
            with state.lock:
                done = state.closed or state.index.sweep(_SWEPT_ROWS)

    def _await_uploads(self, order: PurgeOrder) -> None:
        """Wait for uploads that were purged under way: they may still write their manifest."""
        state = self._state
        with state.lock:
            dropped = [
                each
                for each in state.uploading
                if each in order.uploading
                or (each.dropped and not order.keys and order.tenant in (None, each.tenant))
            ]
            state.upload_done.wait_for(
                lambda: state.closed or not any(each in state.uploading for each in dropped)
            )

    def _make_durable(self, order: PurgeOrder) -> None:
        namespaces = [order.namespace]
        if order.tenant is not None or order.keys:
            found = {namespace_of(folder) for folder in self._client.folders(ROOT)}
            namespaces += [name for name in found if name and name != order.namespace]
        if order.keys:
            self._write_tombstones(order, [n for n in namespaces if n not in order.written])
            self._delete_dead(order)
            self._note_own(order, order.written[order.namespace])
            return
        self._cover_later_names(order, namespaces)
        for namespace in namespaces:
            purge = Purge(namespace, order.tenant, order.purge_id.unix_ms)
            self._client.put(Layout(namespace).purge(order.purge_id), pack_purge(purge))
        for namespace in namespaces:
            layout = Layout(namespace)
            for folder in (layout.manifests, layout.objects, layout.pins):
                self._delete(folder, order)
        self._note_own(order, order.purge_id)

    def _note_own(self, order: PurgeOrder, name: ObjectId) -> None:
        """Have the owner know its own tombstone when it starts again, where its tiers have erased
        what that says."""
        if order.local is not None and is_true(order.local, _LOCAL_S):
            with self._state.lock:
                note(self._state, Erasure((), None, str(name).encode(), spread=False))

    def _write_tombstones(self, order: PurgeOrder, namespaces: Sequence[bytes]) -> None:
        """Write the tombstone of single pages, once into each namespace: what a later one says
        would hide what was stored again since."""
        self._cover_later_names(order, namespaces)
        for namespace in namespaces:
            self._reach_ahead(order, namespace)
            purge = Purge(namespace, None, order.purge_id.unix_ms, order.keys)
            self._client.put(Layout(namespace).purge(order.purge_id), pack_purge(purge))
            order.written[namespace] = order.purge_id

    def _reach_ahead(self, order: PurgeOrder, namespace: bytes) -> None:
        """Raise the bound where the order took long to come here: until the tombstone is there,
        other servers go on storing the pages under names of now."""
        state = self._state
        with state.lock:
            now_ms = state.now_ms()
            if order.purge_id.unix_ms >= now_ms + _MIN_AHEAD_MS:
                return
            order.purge_id = order.purge_id._replace(unix_ms=now_ms + _MAX_SKEW_MS)
            if state.namespace == namespace:
                apply_forget(state, order.keys, order.purge_id.unix_ms)

    def _cover_later_names(self, order: PurgeOrder, namespaces: Sequence[bytes]) -> None:
        """Raise the bound to what other writers have in the bucket, known here or not: by their
        clocks it may be later than the purge."""
        newest = order.purge_id.unix_ms
        for namespace in namespaces:
            for chunk in self._client.listing(Layout(namespace).manifests):
                for listed in chunk:
                    named = parse_path(listed.path)
                    if named is None or named.writer == order.purge_id.writer:
                        continue
                    if _is_of_tenant(order, named):
                        newest = max(newest, named.unix_ms)
        if newest == order.purge_id.unix_ms:
            return
        order.purge_id = order.purge_id._replace(unix_ms=newest)
        state = self._state
        with state.lock:
            if order.keys:
                if state.namespace in namespaces:
                    apply_forget(state, order.keys, newest)
            elif order.tenant is not None or state.namespace == order.namespace:
                apply_remote_purge(state, Purge(order.namespace, order.tenant, newest))

    def _delete_dead(self, order: PurgeOrder) -> None:
        """Delete objects that held pages which were forgotten, and now hold none that counts. The
        others keep the bytes until they go."""
        state, layout = self._state, Layout(order.namespace)
        names = order.names | {
            str(each.object_id) for each in order.uploading if each.namespace == order.namespace
        }
        gone = []
        for name in sorted(names)[:_MAX_READ]:
            try:
                manifest = unpack_manifest(self._client.get(layout.manifest(name)))
            except RequestError as error:
                if error.failure is not Failure.NOT_FOUND:
                    raise
                continue
            with state.lock:
                if manifest is not None and state.forgotten.dead(manifest).all():
                    gone.append(name)
                    if state.namespace == order.namespace:
                        state.index.drop_objects([name])
        self._remove([layout.manifest(name) for name in gone])
        self._remove([layout.object(name) for name in gone])

    def _delete(self, folder: str, order: PurgeOrder) -> None:
        gone: list[str] = []
        for chunk in self._client.listing(folder):
            gone += [listed.path for listed in chunk if self._is_dead(listed.path, order)]
        self._remove(gone)

    def _remove(self, gone: list[str]) -> None:
        for start in range(0, len(gone), _DELETED_AT_ONCE):
            try:
                self._client.delete(gone[start : start + _DELETED_AT_ONCE])
            except RequestError as error:
                if error.failure is not Failure.NOT_FOUND:
                    raise

    def _is_dead(self, path: str, order: PurgeOrder) -> bool:
        """Return whether the name says that it is of the purge: opened up to its bound, or a little
        later by the clock of another writer."""
        named = parse_path(path)
        if named is None or not _is_of_tenant(order, named):
            return False
        skew = 0 if named.writer == order.purge_id.writer else _MAX_SKEW_MS
        return named.unix_ms <= order.purge_id.unix_ms + skew


def _what(order: PurgeOrder) -> bytes | tuple[bytes, ...] | None:
    return order.keys or order.tenant


def _is_of_tenant(order: PurgeOrder, named: ObjectId) -> bool:
    return order.tenant is None or named.tenant_tag == order.purge_id.tenant_tag
