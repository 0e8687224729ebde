"""What each page codec saves, costs and changes: ratio, speed, and the error it puts into logits.

A Llama (the demo model unless --model names another) runs in Transformers on the CPU. The KV of a
prompt's whole pages is cut into pages as they lie in SGLang's host pools, goes through a codec and
back, and the model continues from it: the rest of the prompt, then greedy tokens. The same steps
from exact KV are what every figure is compared with. Nothing of SGLang runs here; keys are cached
after the rotary embedding in both, so the bytes of a page are those a server would store.

The demo model has random weights, and amplifies whatever is done to its KV: float32 KV rounded to
bfloat16 is measured too, for comparison. Sizes and speeds are those of its KV; its errors say
little about a trained model: measure yours with --model.

    python benchmark/measure_codecs.py [--quick] [--model DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sglang_tiered.codecs import CODEC_NAMES, LOSSY_CODEC_NAMES, NO_CODEC, PageLayout, make_codec
from sglang_tiered.codecs.encoded import copied
from sglang_tiered.integration.platforms import processes
from sglang_tiered.tools.machine import describe_machine, describe_versions

processes.declare_torchvision_operators()  # before transformers imports torchvision

from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.codecs import PageCodec

PAGE = 64
DTYPES = ("float32", "bfloat16")
NUM_SPEED_RUNS = 7
ROUNDED = "bfloat16 cache"
"""Not a codec: float32 KV rounded to bfloat16, for comparison."""
ROOT = Path(__file__).parents[1]


class Setting(NamedTuple):
    num_prompts: int
    prefix_tokens: int  # whole pages, through the codec
    rest_tokens: int  # of the prompt, computed on top of them
    new_tokens: int


FULL = Setting(num_prompts=5, prefix_tokens=1024, rest_tokens=32, new_tokens=64)
QUICK = Setting(num_prompts=2, prefix_tokens=256, rest_tokens=32, new_tokens=32)


class Continuation(NamedTuple):
    """Greedy tokens, and the logits each was chosen from: [new_tokens, vocabulary]."""

    tokens: list[int]
    logits: torch.Tensor


class Errors(NamedTuple):
    """Of one prompt, against exact KV."""

    largest: float  # absolute difference of a logit, fed the same tokens
    mean: float
    same_choice: float  # share of steps whose best token is the same, fed the same tokens
    same_text: int  # leading greedy tokens that are the same, each run fed its own


class Model:
    """A causal LM and the pages of its KV."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        config = self.model.config
        self.layout = PageLayout.kv(
            dtype=dtype,
            num_layers=config.num_hidden_layers,
            page_size=PAGE,
            num_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
        )

    def prefill(self, tokens: Sequence[int]) -> torch.Tensor:
        """KV of tokens: [2, layers, tokens, heads, head_dim]."""
        cache = self.model(torch.tensor([tokens]), use_cache=True).past_key_values
        sides = ([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers])
        return torch.stack([torch.stack([x[0].transpose(0, 1) for x in side]) for side in sides])

    def pages(self, kv: torch.Tensor) -> list[np.ndarray]:
        """Bytes of each page, in SGLang's ``page_first_direct`` order."""
        parts = [part.contiguous() for part in kv.split(PAGE, dim=2)]
        return [part.view(torch.uint8).numpy().reshape(-1) for part in parts]

    def from_pages(self, pages: Sequence[np.ndarray], like: torch.Tensor) -> torch.Tensor:
        shape = (*like.shape[:2], PAGE, *like.shape[3:])
        parts = [torch.from_numpy(page).view(like.dtype).reshape(shape) for page in pages]
        return torch.cat(parts, dim=2)

    def resume(
        self, kv: torch.Tensor, rest: Sequence[int], num_new: int, fed: Sequence[int] | None = None
    ) -> Continuation:
        """Continue behind ``kv``: the rest of the prompt, then greedy tokens, or those of ``fed``
        whatever the logits say."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(kv[0], kv[1], strict=True)):
            cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        tokens: list[int] = []
        logits = []
        step = list(rest)
        for index in range(num_new):
            out = self.model(torch.tensor([step]), past_key_values=cache, use_cache=True)
            logits.append(out.logits[0, -1].float())
            tokens.append(int(logits[-1].argmax()) if fed is None else fed[index])
            step = [tokens[-1]]
        return Continuation(tokens, torch.stack(logits))


def through(codec: PageCodec | None, pages: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Pages encoded and decoded, and the bytes between; None is no codec."""
    back, num_bytes = [], 0
    for page in pages:
        decoded = np.empty_like(page)
        if codec is None:
            decoded[:] = page
            num_bytes += page.nbytes
        else:
            data = copied(codec.encode((memoryview(page),)))
            codec.decode(data.data, (memoryview(decoded),))
            num_bytes += data.nbytes
        back.append(decoded)
    return back, num_bytes


def errors(model: Model, kv: torch.Tensor, rest: Sequence[int], exact: Continuation) -> Errors:
    num_new = len(exact.tokens)
    fed = model.resume(kv, rest, num_new, exact.tokens)
    difference = (fed.logits - exact.logits).abs()
    same = fed.logits.argmax(-1) == exact.logits.argmax(-1)
    # As long as the best tokens agree, a run fed its own tokens is this one.
    same_text = num_new if bool(same.all()) else int((~same).nonzero()[0])
    return Errors(
        difference.max().item(), difference.mean().item(), same.float().mean().item(), same_text
    )


def speeds(codec: PageCodec, pages: Sequence[np.ndarray]) -> tuple[list[float], list[float]]:
    """MB/s of page bytes on this thread, encoding and decoding: one figure per run over pages."""
    num_bytes = sum(page.nbytes for page in pages)
    encoded = [copied(codec.encode((memoryview(page),))) for page in pages]
    targets = [np.empty_like(page) for page in pages]

    def encode() -> None:
        for page in pages:
            copied(codec.encode((memoryview(page),)))

    def decode() -> None:
        for data, target in zip(encoded, targets, strict=True):
            codec.decode(data.data, (memoryview(target),))

    return _megabytes_per_s(encode, num_bytes), _megabytes_per_s(decode, num_bytes)


def _megabytes_per_s(work: Callable[[], None], num_bytes: int) -> list[float]:
    work()
    runs = []
    for _ in range(NUM_SPEED_RUNS):
        begun = time.perf_counter()
        work()
        runs.append(num_bytes / (time.perf_counter() - begun) / 1e6)
    return runs


def measure(path: Path, dtype: str, setting: Setting) -> dict[str, dict[str, Any]]:
    """Per codec: encoded sizes, speeds and errors, over prompts of printable bytes."""
    model = Model(path, dtype)
    source = random.Random(0)
    vocabulary = min(model.model.config.vocab_size, 127)
    found: dict[str, dict[str, Any]] = {
        name: {"compression": [], "errors": []} for name in CODEC_NAMES
    }
    for number in range(setting.num_prompts):
        prompt = [
            source.randrange(32, vocabulary)
            for _ in range(setting.prefix_tokens + setting.rest_tokens)
        ]
        prefix, rest = prompt[: setting.prefix_tokens], prompt[setting.prefix_tokens :]
        kv = model.prefill(prefix)
        exact = model.resume(kv, rest, setting.new_tokens)
        pages = model.pages(kv)
        for name in CODEC_NAMES:
            result = found[name]
            codec = None if name == NO_CODEC else make_codec(name, model.layout)
            back, num_bytes = through(codec, pages)
            result["compression"].append(sum(page.nbytes for page in pages) / num_bytes)
            result["errors"].append(errors(model, model.from_pages(back, kv), rest, exact))
            if name not in LOSSY_CODEC_NAMES and any(error.largest for error in result["errors"]):
                raise SystemExit(f"{name} in {dtype} changed a logit: it is not exact.")
            if codec is not None and number == 0:
                result["encode_mb_s"], result["decode_mb_s"] = speeds(codec, pages)
        if dtype == "float32":
            rounded = found.setdefault(ROUNDED, {"compression": [], "errors": []})
            rounded["compression"].append(2.0)
            rounded["errors"].append(errors(model, kv.bfloat16().float(), rest, exact))
        found[NO_CODEC]["logit_std"] = exact.logits.std().item()
        best = exact.logits.topk(2).values
        found[NO_CODEC]["median_gap"] = (best[:, 0] - best[:, 1]).median().item()
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "value": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def add_rows(table: Table, dtype: str, found: dict[str, dict[str, Any]]) -> None:
    for name, result in found.items():
        wrong: list[Errors] = result["errors"]
        speed = [
            f"{statistics.median(result[key]):.0f}" if key in result else "-"
            for key in ("encode_mb_s", "decode_mb_s")
        ]
        table.add_row(
            dtype,
            name,
            f"{statistics.median(result['compression']):.3f}",
            *speed,
            f"{max(error.largest for error in wrong):.4f}",
            f"{statistics.mean(error.mean for error in wrong):.5f}",
            f"{statistics.mean(error.same_choice for error in wrong):.2%}",
            f"{statistics.median(error.same_text for error in wrong):.0f}",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer tokens")
    parser.add_argument("--model", type=Path, help="a directory in Transformers' format")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    setting = QUICK if options.quick else FULL
    torch.set_num_threads(1)

    columns = "KV,codec,ratio,encode MB/s,decode MB/s,max |dlogit|,mean |dlogit|,same choice"
    table = Table(*columns.split(","), f"same text of {setting.new_tokens}")
    ratios: dict[str, dict[str, float]] = {}
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        name, path = "as given", options.model
        if path is None:
            shape = "8m" if options.quick else "85m"
            name, path = f"demo {shape}, random weights", Path(scratch) / "demo"
            script = ROOT / "scripts" / "make_demo_model.py"
            command = [sys.executable, str(script), str(path), "--shape", shape]
            subprocess.run(command, check=True, timeout=300)
        for dtype in DTYPES:
            found = measure(path, dtype, setting)
            add_rows(table, dtype, found)
            raw[dtype] = {
                codec: {**result, "errors": [error._asdict() for error in result["errors"]]}
                for codec, result in found.items()
            }
            for codec, result in found.items():
                if codec not in {NO_CODEC, ROUNDED}:
                    ratios[f"{codec}_compression_{dtype}"] = spread(result["compression"])
    console = Console(width=120)
    console.print(f"model: {name}; {setting}")
    console.print(table)
    for dtype, result in raw.items():
        scale = result[NO_CODEC]
        console.print(
            f"{dtype}: logits have a standard deviation of {scale['logit_std']:.2f}; the best is "
            f"{scale['median_gap']:.2f} above the second (median)."
        )
    if options.json is not None:
        document = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"model": name, "page_size": PAGE, "threads": 1, **setting._asdict()},
            "ratios": ratios,
            "raw": raw,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
