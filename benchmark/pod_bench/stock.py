"""SGLang's own Triton kernels, loaded from its files without importing SGLang.

The four files need little of the package around them: answers to "is this AMD?" and the number of
multiprocessors. So a machine with torch and Triton only can measure them from a folder, and one
with SGLang installed need not load a server. Nothing of SGLang's is part of this repository.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import time
import types
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pod_bench.contenders import Contender, num_sms, on_two_streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from pod_bench.batch import Batch


_PACKAGE = "sglang.kernels.ops.attention"
_FILES = ("score_mod", "metadata", "decode_attention", "extend_attention")
MAX_KV_SPLITS = 8  # SGLang's default of --triton-attention-num-kv-splits


class MissingKernelsError(Exception):
    """The kernels are not where they should be; the message is one sentence."""


def find_kernels(folder: Path | None) -> Path:
    """The folder with SGLang's kernels: the given one, or the installed package's."""
    if folder is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise MissingKernelsError(
                "SGLang is not installed; pass --sglang-kernels DIR with its "
                "kernels/ops/attention folder."
            )
        folder = Path(spec.submodule_search_locations[0]) / "kernels" / "ops" / "attention"
    missing = [f"{name}.py" for name in _FILES if not (folder / f"{name}.py").is_file()]
    if missing:
        raise MissingKernelsError(f"{folder.name} has no {', '.join(missing)}.")
    return folder


class Stock:
    """The loaded kernels. In this process SGLang cannot be imported any more."""

    def __init__(self, folder: Path) -> None:
        modules = _load(folder)
        self._extend = modules["extend_attention"].extend_attention_fwd
        self._decode = modules["decode_attention"].decode_attention_fwd
        self._num_splits = modules["metadata"].get_num_kv_splits_triton

    def contenders(self, batch: Batch) -> list[Contender]:
        """The mixed batch through the extend kernel, as SGLang runs it; extend for the prompts
        then decode for the rest; those two on two streams."""
        prompts, rows = batch.mix.prompts, len(batch.mix.extend_lens)
        outs = [batch.empty_out() for _ in range(3)]
        started = time.perf_counter()
        mixed = self._extend_call(batch, rows, outs[0])
        mixed_plan_s = time.perf_counter() - started

        def alone(run: Callable[[], None], out: torch.Tensor) -> Callable[[], torch.Tensor]:
            def returning() -> torch.Tensor:
                run()
                return out

            return returning

        started = time.perf_counter()
        parts = self._extend_call(batch, prompts, outs[1]), self._decode_call(batch, outs[1])
        serial_plan_s = time.perf_counter() - started

        def both() -> None:
            for part in parts:
                part()

        found = [
            Contender("stock_mixed", alone(mixed, outs[0]), mixed_plan_s),
            Contender("stock_serial", alone(both, outs[1]), serial_plan_s),
        ]
        if batch.q.device.type == "cuda":
            prefill = self._extend_call(batch, prompts, outs[2])
            decode = self._decode_call(batch, outs[2])
            found.append(
                Contender("stock_streams", on_two_streams(prefill, decode, outs[2]), serial_plan_s)
            )
        return found

    def _extend_call(self, batch: Batch, rows: int, out: torch.Tensor) -> Callable[[], None]:
        """The first ``rows`` rows as extends: prefixes from the pool, new keys side by side."""
        device, shape = batch.q.device, batch.shape
        new, old = batch.mix.extend_lens[:rows], batch.mix.prefix_lens[:rows]
        ends = list(accumulate(batch.lengths, initial=0))
        prefixes = [batch.kv_indices[ends[i] : ends[i] + length] for i, length in enumerate(old)]
        fresh = torch.cat(
            [
                batch.kv_indices[ends[i] + length : ends[i] + length + new[i]]
                for i, length in enumerate(old)
            ]
        ).long()
        tokens = sum(new)
        arguments = (
            batch.q[:tokens],
            batch.k_cache[fresh],
            batch.v_cache[fresh],
            out[:tokens],
            batch.k_cache,
            batch.v_cache,
            torch.tensor([0, *accumulate(new)], dtype=torch.int64, device=device),
            torch.tensor([0, *accumulate(old)], dtype=torch.int32, device=device),
            torch.cat(prefixes).long(),
            None,
            True,
            None,
            max(new),
            1.0,
            1.0,
            batch.sm_scale,
        )

        def run() -> None:
            self._extend(*arguments, page_size=shape.page_size)

        return run

    def _decode_call(self, batch: Batch, out: torch.Tensor) -> Callable[[], None]:
        """The rows behind the prompts as decodes over their whole sequences."""
        device, shape, mix = batch.q.device, batch.shape, batch.mix
        begin = sum(batch.lengths[: mix.prompts])
        lengths = torch.tensor(batch.lengths[mix.prompts :], dtype=torch.int32, device=device)
        indptr = torch.zeros(mix.decodes + 1, dtype=torch.int32, device=device)
        indptr[1:] = torch.cumsum(lengths, dim=0)
        splits = torch.empty(mix.decodes, dtype=torch.int32, device=device)
        scratch = (mix.decodes, shape.num_q_heads, MAX_KV_SPLITS)
        logits = torch.empty(*scratch, shape.head_dim, dtype=torch.float32, device=device)
        lse = torch.empty(scratch, dtype=torch.float32, device=device)
        self._num_splits[(1,)](
            splits,
            lengths,
            mix.decodes,
            1,
            shape.num_q_heads,
            shape.num_kv_heads,
            MAX_KV_SPLITS,
            num_sms(device),
            MAX_NUM_SEQ=max(256, 1 << (mix.decodes - 1).bit_length()),
        )
        first = batch.num_prefill_tokens
        arguments = (
            batch.q[first:],
            batch.k_cache,
            batch.v_cache,
            out[first:],
            indptr,
            batch.kv_indices[begin:].long(),
            logits,
            lse,
            splits,
            MAX_KV_SPLITS,
            batch.sm_scale,
            1.0,
            1.0,
        )

        def run() -> None:
            self._decode(*arguments, page_size=shape.page_size)

        return run


class _Unset:
    """SGLang's environment switches, all off."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: False)


def _load(folder: Path) -> dict[str, types.ModuleType]:
    """The four files under the names they import each other by."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    amd = ("is_hip", "is_gfx95_supported", "is_gfx1250_supported", "is_gfx942_supported")
    contents: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("sglang", "sglang.srt", "sglang.kernels", "sglang.kernels.ops"), {}),
        _PACKAGE: {},
        "sglang.srt.environ": {"envs": _Unset()},
        "sglang.srt.utils": {
            "is_cuda": torch.cuda.is_available,
            "get_device_core_count": lambda *_: num_sms(device),
            **dict.fromkeys(amd, lambda: False),
        },
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(attributes)
        sys.modules[name] = module
    loaded = {}
    for name in _FILES:
        spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = loaded[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[name])
    return loaded
