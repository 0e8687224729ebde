"""What a scrape of ``/metrics`` says of each rank."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def by_rank(text: str, name: str, **labels: str) -> dict[str, float]:
    """Values of our samples of a name with these labels, by their rank: one for each."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(ours_of(text)):
        for sample in family.samples:
            if sample.name == f"sglang_tiered_{name}" and labels.items() <= sample.labels.items():
                rank = sample.labels["tp_rank"]
                assert rank not in found, f"two series of rank {rank}: {name} {labels}"
                found[rank] = sample.value
    return found


def ours_of(text: str) -> str:
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("sglang_tiered_")
    )
