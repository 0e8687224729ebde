"""One attention layer of a mixed batch: tiles fused, tiles in turn, SGLang's and FlashInfer's.

    python benchmark/bench_pod_attention.py [--quick] [--json FILE] [--png FILE]
        [--sglang-kernels DIR] [--config A|D] [--check]

Runs on any machine with a CUDA device, torch and Triton. SGLang's kernels come from an installed
SGLang or from DIR, a copy of its ``kernels/ops/attention``; FlashInfer is measured where it is
installed. ``--check`` compares results only, and runs on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

# A bare machine has this repository's files, not its package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from pod_bench.batch import Batch, make_batch
from pod_bench.contenders import Contender, own_contenders
from pod_bench.flashinfer_side import flashinfer_contenders
from pod_bench.gate import DifferentResultsError, check_against, check_against_reference
from pod_bench.mixes import GATE_MIXES, MIXES, QUICK_MIXES, Ceilings, Heads, Mix
from pod_bench.report import MixResult, Report
from pod_bench.stock import MissingKernelsError, Stock, find_kernels
from pod_bench.timing import measure, measure_ceilings, prepare
from sglang_tiered_kernels.pod_attention import CONFIGS, PodConfig

# A CPU's interpreter needs milliseconds per step of a tile.
CPU_HEADS = Heads(queries=4, kv=2, dim=32)
CPU_CONFIG = PodConfig("check", block_m=32, block_n=32, block_n_decode=32, split_len=64)


class Field:
    """Everybody who can be measured on this machine."""

    def __init__(self, stock: Stock | None, config: PodConfig | None) -> None:
        self._stock, self._config = stock, config
        self._said: set[str] = set()
        self._excluded: set[str] = set()

    def contenders(self, batch: Batch) -> list[Contender]:
        found = own_contenders(batch, self._config)
        if self._stock is not None:
            found += self._stock.contenders(batch)
        if batch.q.device.type == "cuda":
            found += flashinfer_contenders(batch, self._say)
        return [contender for contender in found if contender.name not in self._excluded]

    def judge(self, contender: Contender, error: DifferentResultsError) -> None:
        """A peer that differs is left out from here on; anybody else ends the run."""
        if not contender.name.startswith("flashinfer"):
            raise error
        self._excluded.add(contender.name)
        self._say(f"{contender.name} is left out: {error}")

    def _say(self, line: str) -> None:
        """Once per reason, not per mix."""
        if line not in self._said:
            self._said.add(line)
            print(line)


def check(field: Field, heads: Heads, dtypes: list[torch.dtype], device: torch.device) -> None:
    """Everybody against the reference on small odd mixes. Raises ``DifferentResultsError``."""
    for dtype in dtypes:
        for mix, page_size in zip(GATE_MIXES, (64, 1, 16), strict=True):
            batch = make_batch(mix, heads, page_size=page_size, dtype=dtype, device=device)
            for contender in field.contenders(batch):
                try:
                    check_against_reference(batch, contender.name, contender.run())
                except DifferentResultsError as error:
                    field.judge(contender, error)


def run_mix(
    field: Field,
    mix: Mix,
    heads: Heads,
    ceilings: Ceilings,
    options: argparse.Namespace,
    device: torch.device,
) -> MixResult:
    """Measure everybody on one mix, once all give the results of our serial tiles."""
    batch = make_batch(
        mix,
        heads,
        page_size=options.page_size,
        dtype=torch.bfloat16,
        device=device,
    )
    contenders = field.contenders(batch)
    prepared = [prepare(contender) for contender in contenders]
    expected = prepared[0].output
    assert isinstance(expected, torch.Tensor)
    errors, timed = {}, []
    for one in prepared:
        name = one.contender.name
        try:
            errors[name] = check_against(batch, name, one.output, expected)
        except DifferentResultsError as error:
            field.judge(one.contender, error)
            continue
        timed.append(one)
    samples = measure(timed, options.samples)
    return MixResult(
        mix,
        samples,
        mix.least_s(heads, ceilings),
        {one.contender.name: one.contender.plan_s for one in timed},
        errors,
        {one.contender.name: one.graph for one in timed},
        contenders[0].note,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="three mixes, seven samples")
    parser.add_argument("--check", action="store_true", help="compare results, measure nothing")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--png", type=Path, help="also draw them (needs matplotlib)")
    parser.add_argument("--sglang-kernels", type=Path, metavar="DIR", help="SGLang's kernel files")
    parser.add_argument("--config", choices=CONFIGS, help="our tiles; default: by batch")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--samples", type=int, help="per contender and mix, at least 5")
    options = parser.parse_args(arguments)
    options.samples = max(5, options.samples or (7 if options.quick else 15))
    return options


def find_stock(folder: Path | None, on_gpu: bool) -> Stock | None:
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        print("SGLang's kernels are left out: without a GPU they need TRITON_INTERPRET=1.")
        return None
    try:
        return Stock(find_kernels(folder))
    except MissingKernelsError as error:
        print(f"SGLang's kernels are left out: {error}")
        return None


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.check:
        print(
            "bench_pod_attention: there is no CUDA device, and a CPU's times say nothing about a "
            "GPU's; --check compares results here.",
            file=sys.stderr,
        )
        return 2
    stock = find_stock(options.sglang_kernels, on_gpu)
    config = CONFIGS[options.config] if options.config else None
    heads, device = Heads(), torch.device("cuda" if on_gpu else "cpu")
    try:
        if on_gpu:
            field = Field(stock, config)
            check(field, heads, [torch.bfloat16, torch.float16], device)
        else:
            field = Field(stock, CPU_CONFIG)
            check(field, CPU_HEADS, [torch.float16], device)
        if options.check:
            print("All results are equal.")
            return 0
        ceilings = measure_ceilings(torch.bfloat16, device)
        print(
            f"ceilings in this run: {ceilings.flops / 1e12:.0f} TF/s by a matrix product, "
            f"{ceilings.bytes / 1e9:.0f} GB/s by a copy\n"
        )
        settings = {
            "samples": options.samples,
            "page_size": options.page_size,
            "config": options.config or "by batch",
            "dtype": "bfloat16",
        }
        report = Report(heads, ceilings, settings)
        for mix in QUICK_MIXES if options.quick else MIXES:
            report.results.append(run_mix(field, mix, heads, ceilings, options, device))
            print(report.text(report.results[-1]) + "\n", flush=True)
            if options.json:  # each time, so that a run that is stopped has told what it measured
                options.json.write_text(json.dumps(report.document(), indent=1) + "\n")
            torch.cuda.empty_cache()
    except DifferentResultsError as error:
        print(f"bench_pod_attention: nothing to compare: {error}", file=sys.stderr)
        return 1
    document = report.document()
    for name in ("fused_over_own_serial", "fused_over_stock_mixed", "fused_over_best_serial"):
        if name in document["ratios"]:
            figure = document["ratios"][name]
            print(f"{name}: {figure['value']:.3f} ({figure['min']:.3f} to {figure['max']:.3f})")
    if options.png:
        report.plot(options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
