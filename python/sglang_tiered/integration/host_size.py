"""The host tier's size as SGLang takes it: of the target model's pools, without padding.

SGLang divides it among a hybrid model's pools, adds a page of padding, and makes the host pool of a
draft model beside it, as many tokens long. The cap of ``--tier-host-bytes`` covers all of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["target_host_bytes"]


def target_host_bytes(
    host_bytes: int, target: Any, drafts: Iterable[Any], *, page_size: int
) -> int:
    """What of ``host_bytes`` the target's host pools may take.

    ``target`` and ``drafts`` are device pools of SGLang: what a token takes there, it takes in host
    memory. At least one page, however small the cap.
    """
    target_token_bytes = _token_bytes(target)
    token_bytes = target_token_bytes + sum(_token_bytes(draft) for draft in drafts)
    page_bytes = target_token_bytes * page_size
    share = host_bytes * target_token_bytes / token_bytes
    return int(max(page_bytes, share - page_bytes))


def _token_bytes(pool: Any) -> float:
    sizes = pool.get_kv_size_bytes()
    return float(sum(sizes) if isinstance(sizes, tuple) else sizes) / max(1, int(pool.size))
