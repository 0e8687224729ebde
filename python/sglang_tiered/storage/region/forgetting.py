"""How the store forgets on order (one tenant, everything, or a namespace), and who holds what.

Beginning hides the pages at once, in memory, and lets nothing under way become visible; then the
writer thread makes it so on disk, which ``Forgetting.wait`` waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.base import TenantUsage
from sglang_tiered.storage.forgetting import Forgetting
from sglang_tiered.storage.region.jobs import ClearOrder, PurgeOrder

if TYPE_CHECKING:
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["begin", "set_namespace", "tenants"]


def begin(state: StoreState, tenant: bytes | None) -> Forgetting:
    """Forget a tenant, or everything. Memory only."""
    with state.lock:
        if state.closed:
            return Forgetting(None)
        order: ClearOrder | PurgeOrder
        if tenant is None:
            state.num_pages_purged += len(state.index)
            state.forget_all(keep=False)
            state.stores.append(order := ClearOrder())
        else:
            state.forget_tenant(tenant)
            state.stores.appendleft(order := PurgeOrder(tenant))
        state.store_ready.notify()
        return Forgetting(order, state.jobs.inflight)


def tenants(state: StoreState, limit: int) -> list[TenantUsage]:
    """See ``TierEngine.tenants``."""
    with state.lock:
        held, taken = state.index.usage(), state.regions.tenant_bytes.copy()
    names = sorted(held.keys() | taken.keys(), key=lambda name: -taken[name])
    return [TenantUsage(name, *held.get(name, (0, 0)), taken[name]) for name in names[:limit]]


def set_namespace(state: StoreState, namespace: bytes, *, keep: bool) -> None:
    """See ``RegionEngine.set_namespace``."""
    with state.lock:
        state.forget_all(keep=keep)
        state.namespace = namespace
