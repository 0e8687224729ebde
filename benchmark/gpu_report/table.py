"""The report as lines that a terminal shows: a figure each, and a mix of the kernels each."""

from __future__ import annotations

import statistics
from typing import Any


def table(report: dict[str, Any]) -> str:
    """Every figure of a ``report.json``, part by part; for mixed batches microseconds by contender
    and how many times the roofline each took."""
    lines = [f"\n{report['device']}, {report['date']}, torch {report['versions']['torch']}"]
    for name, part in report["parts"].items():
        lines.append(f"\n{name}: {part['outcome']}, {part['seconds']:.0f} s")
        if part["outcome"].startswith("failed"):
            lines += [f"  {line[:200]}" for line in part.get("log", "").splitlines()[-14:]]
        for figure in part["figures"]:
            if "skipped" in figure:
                lines.append(f"  {figure['name']:44s} skipped: {figure['skipped'][-300:]}")
                continue
            spread = f"  ({figure['min']:.4g} to {figure['max']:.4g})" if "min" in figure else ""
            share = figure.get("share_of_prompt")
            loaded = "" if share is None else f"  share of prompt {share:.2f}"
            value = f"{figure['value']:.4g} {figure['unit']}"
            lines.append(f"  {figure['name']:44s} {value}{spread}{loaded}")
            if "document" in figure:
                lines += _mixes(figure["document"])
    return "\n".join(lines)


def _mixes(document: dict[str, Any]) -> list[str]:
    lines = []
    for mix, raw in document["raw"].items():
        least_s = raw["roofline_s"]
        medians = {name: statistics.median(samples) for name, samples in raw["seconds"].items()}
        told = ", ".join(
            f"{name} {1e6 * seconds:.0f} ({seconds / least_s:.2f})"
            for name, seconds in sorted(medians.items(), key=lambda item: item[1])
        )
        lines.append(f"    {mix}: roofline {1e6 * least_s:.0f} us; {told}")
    return lines
