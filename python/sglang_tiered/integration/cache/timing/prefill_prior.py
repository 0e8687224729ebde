"""What a prefill costs before the server has seen one: a probe of the processor at start.

Prefill is matrix products: two operations per weight and token. So the rate of one product in the
model's number format, times the weights this rank holds, says what a token costs within a factor
of two or three, which is all that is needed until batches have been measured. What pairs of tokens
cost (attention) keeps the prior's share.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_model

from sglang_tiered.integration.cache.load_planner import LoadPlanner
from sglang_tiered.integration.identity.model import find_weight_files
from sglang_tiered.policy.cost_model import PRIOR_PREFILL, CostModel, PrefillCost

if TYPE_CHECKING:
    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["make_planner", "probe_prefill"]

ROWS, SIDE = 512, 2048
NUM_TIMES = 7
MAX_S = 0.2
PRODUCT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def probe_prefill(
    model_path: str,
    revision: str | None,
    download_dir: str | None = None,
    *,
    dtype: torch.dtype,
    device: str,
    num_ranks: int,
    token_bytes: int,
) -> PrefillCost:
    """Return a cost with a prior for this machine and model. Takes about 100 ms on a CPU, less on
    a GPU.

    ``dtype`` is that of the KV pool; where KV is kept in 8 bits, products are taken to run in
    bfloat16. ``token_bytes``: KV of one token on this rank. Returns the prior of
    ``policy.cost_model`` where no weights can be found (``--load-format dummy``) or the format has
    no matrix product here.
    """
    dtype = dtype if dtype in PRODUCT_TYPES else torch.bfloat16
    files = find_weight_files(model_path, revision, download_dir)
    num_weights = sum(file.stat().st_size for file in files)
    num_weights //= dtype.itemsize * max(1, num_ranks)
    rate = _operations_per_s(dtype, device) if num_weights else None
    if not rate:
        return PrefillCost(token_bytes=token_bytes)
    per_batch, per_token, per_pair = PRIOR_PREFILL
    scale = 2 * num_weights / rate / per_token
    prior = (per_batch, scale * per_token, scale * per_pair)
    return PrefillCost(prior, token_bytes=token_bytes)


def _operations_per_s(dtype: torch.dtype, device: str) -> float | None:
    try:
        rows = torch.ones(ROWS, SIDE, dtype=dtype, device=device)  # [ROWS, SIDE]
        weights = torch.ones(SIDE, SIDE, dtype=dtype, device=device)  # [SIDE, SIDE]
        times: list[float] = []
        while len(times) < NUM_TIMES and sum(times) < MAX_S:
            begun = time.perf_counter()
            result = rows @ weights
            result[0, 0].item()  # waits for an accelerator
            times.append(time.perf_counter() - begun)
    except (RuntimeError, NotImplementedError):
        return None
    return 2 * ROWS * SIDE * SIDE / min(times)


def make_planner(cache: Any, storage: TieredStorage, *, always: bool) -> LoadPlanner[Any]:
    """Make the planner of a cache's loads, whose first guesses fit this machine and model.
    ``always``: load everything, whatever it costs."""
    page_size = int(cache.page_size)
    bytes_per_token = max(1, storage.page_bytes() // page_size)
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    model = get_model()
    prefill = probe_prefill(
        model.model_path,
        model.revision,
        model.download_dir,
        dtype=getattr(pool, "dtype", torch.float16),
        device=str(cache.device),
        num_ranks=int(cache.tp_world_size * cache.pp_size),
        token_bytes=bytes_per_token,
    )
    costs = CostModel(page_tokens=page_size, bytes_per_token=bytes_per_token, prefill=prefill)
    return LoadPlanner(costs, always=always, follows=storage.borrows)
