"""Pages of a storage that are stored and loaded at once, without a controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

DEADLINE_S = 60.0


def queue_store(storage: Any, hashes: Sequence[str], **of_node: Any) -> Any:
    return storage.gate.queue_store(hashes, **{"num_tokens": 64 * len(hashes), **of_node})


def store_pages(
    storage: Any,
    hashes: Sequence[str],
    host_indices: torch.Tensor,
    pool: Any = "kv",
    *,
    store: Any = None,
    **of_node: Any,
) -> list[bool]:
    store = store or queue_store(storage, hashes, **of_node)
    stored: list[bool] = storage.end_store(storage.begin_store(pool, hashes, host_indices, store))
    return stored


def load_pages(
    storage: Any, hashes: Sequence[str], host_indices: torch.Tensor, pool: Any = "kv", **more: Any
) -> list[bool]:
    job = storage.begin_load(pool, hashes, host_indices, **more)
    assert job.wait(DEADLINE_S)
    loaded: list[bool] = job.ok
    return loaded
