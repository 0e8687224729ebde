"""What a prefill costs: probed before the server has seen one, and then timed, for the cost model.

Prefill is matrix products: two operations per weight and token. So the rate of one product in the
model's number format, times the weights this rank holds, says what a token costs within a factor of
two or three. No more is needed until batches have been measured. What pairs of tokens cost
(attention) keeps the prior's share.

On a CPU a forward runs within ``Scheduler.run_batch``. On an accelerator ``run_batch`` only
launches it, and ``process_batch_result`` begins by waiting for its end. The batch then took the
time since its launch, or since the batch before it ended if that was later. Copies of cached tokens
to the device run beside the batch that needs them, and are told with its time.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from sglang.srt.runtime_context import get_model

from sglang_tiered.integration.cache.load_planner import LoadPlanner
from sglang_tiered.integration.identity.model import find_weight_files, one_copy
from sglang_tiered.policy.cost_model import PRIOR_PREFILL, CostModel, PrefillCost

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_tiered.integration.storage.backend import TieredStorage


WARM_UP = (16, 256)
SHAPES = (*((16, 1024),) * 3, *((64, 1024),) * 2, *((256, 1024),) * 2, *((512, 2048),) * 4)
"""Rows and sides of the products. One is begun only while its time, at the best rate so far, fits
into ``MAX_S`` with those before it."""
MAX_S = 0.3
PRODUCT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHTS_AN_ELEMENT = {"I32": 8, "U8": 2}  # where four bits each are packed; others hold one
_BYTES_A_WEIGHT = 2  # in files that do not say
_MAX_HEADER_BYTES = 100 << 20


MAX_LAUNCHED = 64
"""Bounds the launched batches without a result; with one pipeline stage there are two."""


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
    """Return a cost with a prior for this machine and model. Takes about 300 ms, however
    slow the format is here.

    ``dtype`` is that of the KV pool; where KV is kept in 8 bits, products are taken to run in
    bfloat16. ``token_bytes``: KV of one token on this rank. Returns the prior of
    ``policy.cost_model`` where no weights can be found (``--load-format dummy``) or the format has
    no matrix product here.
    """
    dtype = dtype if dtype in PRODUCT_TYPES else torch.bfloat16
    files = one_copy(find_weight_files(model_path, revision, download_dir))
    num_weights = sum(map(_num_weights, files)) // max(1, num_ranks)
    rate = _operations_per_s(dtype, device) if num_weights else None
    if not rate:
        return PrefillCost(token_bytes=token_bytes)
    per_batch, per_token, per_pair = PRIOR_PREFILL
    scale = 2 * num_weights / rate / per_token
    prior = (per_batch, scale * per_token, scale * per_pair)
    return PrefillCost(prior, token_bytes=token_bytes)


def _num_weights(file: Path) -> int:
    """The weights in a file, of whatever format: what the server computes in may be another."""
    num_bytes = file.stat().st_size
    if file.suffix != ".safetensors":
        return num_bytes // _BYTES_A_WEIGHT
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, _MAX_HEADER_BYTES)))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        return sum(
            math.prod(tensor["shape"]) * _WEIGHTS_AN_ELEMENT.get(tensor["dtype"], 1)
            for tensor in tensors
        )
    except (ValueError, TypeError, KeyError, AttributeError):  # SGLang will say what is wrong
        return num_bytes // _BYTES_A_WEIGHT


def _operations_per_s(dtype: torch.dtype, device: str) -> float | None:
    """The rate of the products that a layer's weights are used in (``F.linear``: a plain product
    takes another path, in float16 on a CPU one that is fifty times slower)."""
    best = spent = 0.0
    try:
        _product_s(*WARM_UP, dtype, device)  # the first of a process takes longer
        for num_rows, side in SHAPES:
            operations = 2 * num_rows * side * side
            if best and spent + operations / best > MAX_S:
                break
            seconds = _product_s(num_rows, side, dtype, device)
            spent += seconds
            best = max(best, operations / seconds)
    except (RuntimeError, NotImplementedError):
        return None
    return best


def _product_s(num_rows: int, side: int, dtype: torch.dtype, device: str) -> float:
    rows = torch.ones(num_rows, side, dtype=dtype, device=device)  # [rows, side]
    weights = torch.ones(side, side, dtype=dtype, device=device)  # [side, side]
    begun = time.perf_counter()
    F.linear(rows, weights)[0, 0].item()  # waits for an accelerator
    return time.perf_counter() - begun


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


class PrefillClock:
    """Times prefill batches by two AROUND hooks of one scheduler process. Scheduler thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended_at = 0.0
        # Of batches without a result: tokens copied to the device, and whether it is a prefill.
        self._launched: OrderedDict[int, tuple[int, bool]] = OrderedDict()

    def around_run(self, run: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any) -> Any:
        tiering = _tiering_of(scheduler)
        if tiering is None:
            return run(scheduler, batch, *rest)
        # Asked now: under overlap the result comes with a copy of the batch, which has neither the
        # device nor the load that the batch waits for.
        num_copied = tiering.take_copied() if _waits_for_a_load(batch) else 0
        running = scheduler.running_batch
        num_running = len(batch.reqs) + (0 if running is batch else len(running.reqs))
        tiering.planner.note_run(num_running)
        begun, spans = self._clock(), _prefill_spans(batch)
        if spans:
            tiering.prefill_begins(spans, begun)
        result = run(scheduler, batch, *rest)
        if str(batch.device).startswith("cpu"):
            ended = self._clock()
            self._tell(tiering, batch, ended - begun, num_copied)
            if spans:
                tiering.work.ended(ended)
        else:
            self._launched[batch.forward_iter] = num_copied, bool(spans)
            if len(self._launched) > MAX_LAUNCHED:
                _, (_, is_prefill) = self._launched.popitem(last=False)
                if is_prefill:
                    tiering.work.ended(self._clock())
        return result

    def around_result(
        self, process: Callable[..., Any], scheduler: Any, batch: Any, result: Any
    ) -> Any:
        tiering = _tiering_of(scheduler)
        returned = process(scheduler, batch, result)
        ended = self._clock()
        if batch.forward_iter in self._launched and batch.launch_ts is not None:
            num_copied, is_prefill = self._launched.pop(batch.forward_iter)
            if tiering is not None:
                seconds = ended - max(batch.launch_ts, self._ended_at)
                self._tell(tiering, batch, seconds, num_copied)
                if is_prefill:
                    tiering.work.ended(ended)
        self._ended_at = ended
        return returned

    @staticmethod
    def _tell(tiering: Any, batch: Any, seconds: float, num_copied: int) -> None:
        if spans := _prefill_spans(batch):
            tiering.planner.note_batch(spans, seconds, num_copied)
            # On a CPU a copy is done when its call returns, before the batch runs.
            is_cpu = str(batch.device).startswith("cpu")
            tiering.notes.batch_ran(batch.reqs, spans, seconds, copies_beside=not is_cpu)


def _tiering_of(scheduler: Any) -> Any:
    return getattr(scheduler.tree_cache, "tiering", None)


def _prefill_spans(batch: Any) -> list[tuple[int, int]]:
    """Return the new tokens of each request of a prefill batch, and the tokens before them; none of
    another batch."""
    if batch.forward_mode.is_extend() and batch.extend_lens and batch.prefix_lens:
        return list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
    return []


def _waits_for_a_load(batch: Any) -> bool:
    """Whether the time of a batch includes copies from the host."""
    return batch.hicache_consumer_index is not None and batch.hicache_consumer_index >= 0
