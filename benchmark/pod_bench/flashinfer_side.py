"""FlashInfer, where it is installed: its POD kernel, and its prefill and decode one by one.

Its prefill comes as FlashAttention-2 and, on Hopper, as FlashAttention-3; the latter with its
decode is the strongest serial pair at hand. Not one of its kernels is compiled here if
``FLASHINFER_DISABLE_JIT`` is set and built ones are in place.
"""

from __future__ import annotations

import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from pod_bench.contenders import Contender

if TYPE_CHECKING:
    from collections.abc import Callable

    from pod_bench.batch import Batch
    from pod_bench.contenders import Output


WORKSPACE_BYTES = 512 << 20


def flashinfer_contenders(batch: Batch, say: Callable[[str], None]) -> list[Contender]:
    """Those that this installation has; ``say`` is told of each that it has not, and why."""
    try:
        import flashinfer
    except Exception as error:  # noqa: BLE001 - a broken installation is as good as none
        say(f"FlashInfer is left out: {_short(error)}")
        return []
    found = []
    for name, make in (
        ("flashinfer_pod", _pod),
        ("flashinfer_fa2_serial", lambda *a: _serial(*a, backend="fa2")),
        ("flashinfer_fa3_serial", lambda *a: _serial(*a, backend="fa3")),
    ):
        try:
            started = time.perf_counter()
            run = make(flashinfer, batch)
            plan_s = time.perf_counter() - started
            run()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - whatever it raises, the others go on
            say(f"{name} is left out: {_short(error)}")
            continue
        found.append(Contender(name, run, plan_s))
    return found


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:160]


def _paged(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches as [pages, page_size, kv_heads, dim]."""
    size = batch.shape.page_size
    return tuple(  # type: ignore[return-value]
        cache.view(-1, size, *cache.shape[1:]) for cache in (batch.k_cache, batch.v_cache)
    )


def _role(batch: Batch, rows: slice) -> tuple[torch.Tensor, ...]:
    """qo_indptr, kv_indptr (in pages), kv_indices, last_page_len of some rows."""
    new, lengths, pages = batch.mix.extend_lens[rows], batch.lengths[rows], batch.pages[rows]
    size, device = batch.shape.page_size, batch.q.device

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    return (
        integers(accumulate(new, initial=0)),
        integers(accumulate(map(len, pages), initial=0)),
        torch.cat(pages),
        integers((length - 1) % size + 1 for length in lengths),
    )


def _pod(flashinfer: Any, batch: Batch) -> Callable[[], Output]:
    shape, prompts, first = batch.shape, batch.mix.prompts, batch.num_prefill_tokens
    device = batch.q.device
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD"
    )
    wrapper.plan(
        *_role(batch, slice(prompts)),
        *_role(batch, slice(prompts, None)),
        num_qo_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        q_data_type=shape.q_dtype,
        kv_data_type=shape.kv_dtype,
        sm_scale=batch.sm_scale,
    )
    cache = _paged(batch)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        prefill, decode = wrapper.run(batch.q[:first], cache, batch.q[first:], cache, causal_p=True)
        return prefill, decode

    return run


def _serial(flashinfer: Any, batch: Batch, *, backend: str) -> Callable[[], Output]:
    shape, prompts, first = batch.shape, batch.mix.prompts, batch.num_prefill_tokens
    device = batch.q.device

    def workspace() -> torch.Tensor:
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend=backend)
    prefill.plan(
        *_role(batch, slice(prompts)),
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        causal=True,
        sm_scale=batch.sm_scale,
        q_data_type=shape.q_dtype,
        kv_data_type=shape.kv_dtype,
    )
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", use_tensor_cores=True
    )
    decode.plan(
        *_role(batch, slice(prompts, None))[1:],
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        sm_scale=batch.sm_scale,
        q_data_type=shape.q_dtype,
        kv_data_type=shape.kv_dtype,
    )
    cache, out = _paged(batch), batch.empty_out()

    def run() -> torch.Tensor:
        prefill.run(batch.q[:first], cache, out=out[:first])
        decode.run(batch.q[first:], cache, out=out[first:])
        return out

    return run
