"""Write the tables of the documents from what the code declares.

    python scripts/write_tables.py [--check]

Between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` of a page stands the table of that
name. ``--check`` writes nothing and exits with 1 where a page says something else.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.config import NvmeConfig, TieredConfig, TransferConfig
from sglang_tiered.flags import Flag, flags_of
from sglang_tiered.metrics import METRICS, TRANSFER_METRICS, Metric, MetricKind
from sglang_tiered.remote_config import ObjectConfig, PeerConfig
from sglang_tiered.request_log import RequestLogConfig
from sglang_tiered.sharing import membership
from sglang_tiered.sharing.pages import messages as pages
from sglang_tiered.storage.bucket import names as bucket
from sglang_tiered.storage.region import directory, erase_log
from sglang_tiered.storage.region import format as regions
from sglang_tiered.transfer import messages as handoff

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "docs/flags.md",
    "docs/metrics.md",
    "docs/upgrading.md",
)
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.S)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    return lines[0] + "|---" * len(header) + "|\n" + "".join(lines[1:])


def flag_table(flags: Iterable[Flag]) -> str:
    """Flags, or settings, each with what it takes."""
    return table(
        ("name", "takes", "default", "meaning"),
        ((f"`{f.name}`", f"`{f.kind.metavar}`", f.default, f.help) for f in flags),
    )


def metric_table(metrics: Iterable[Metric]) -> str:
    """Metrics as they are exported, but for the prefix, by their own labels."""
    by_labels: dict[str, list[str]] = {}
    for metric in metrics:
        suffix = "_total" if metric.kind is MetricKind.COUNTER else ""
        is_histogram = metric.kind is MetricKind.HISTOGRAM
        shown = f"`{metric.name}{suffix}`{' (histogram)' if is_histogram else ''}"
        by_labels.setdefault("; ".join(label_texts(metric)), []).append(shown)
    return table(("labels", "metrics"), ((own, ", ".join(by_labels[own])) for own in by_labels))


def label_texts(metric: Metric) -> Iterator[str]:
    """A metric's own labels, each with its values where those are known."""
    for place, label in enumerate(metric.labels):
        values = {
            (*source.labels, *key)[place]: None
            for source in metric.sources
            for key in source.known or [("",) * len(metric.labels)]
            if place < len(source.labels) or source.known
        }
        yield f"`{label}`: {', '.join(values)}" if values else f"`{label}`"


def version_table() -> str:
    """What is written to disks and wires, and what another version of it meets."""
    store = f"manifest of {directory.STORE_VERSION}, regions of format {regions.FORMAT_VERSION}, "
    rows = (
        (
            "region store",
            f"{store}`{erase_log.ERASED_NAME}` of {erase_log.VERSION}",
            "refuses a newer format, and leaves it untouched; an older one is read, or removed "
            "with a line in the log",
        ),
        (
            "bucket",
            f"`{bucket.ROOT}/`",
            "neither sees the other's pages; `sglang-tiered store gc URL` removes older ones",
        ),
        (
            "handoff",
            f"`{(handoff.MAGIC + b'%d' % handoff.VERSION).decode()}`",
            "both sides refuse each other with a sentence that names both versions; the request "
            "fails",
        ),
        (
            "pages between servers",
            f"`{pages.VERSION_FRAME.decode()}`",
            "refused likewise; the page is a miss",
        ),
        (
            "servers in Redis",
            f"format {membership.VERSION}, `{membership.PREFIX}:`",
            "values of another version are passed over",
        ),
    )
    return table(("what", "version", "an older peer or program"), rows)


def tables() -> dict[str, str]:
    """Every table, by its name."""
    sections = {
        "tiers": (TieredConfig, NvmeConfig),
        "object": (ObjectConfig,),
        "peers": (PeerConfig,),
        "requests": (RequestLogConfig,),
        "transfer": (TransferConfig,),
    }
    every = [flag for configs in sections.values() for flag in flags_of(*configs)]
    return {
        **{
            name: flag_table(flag for flag in flags_of(*configs) if not flag.is_setting)
            for name, configs in sections.items()
        },
        "settings": flag_table(flag for flag in every if flag.is_setting),
        "metrics": metric_table((*METRICS, *TRANSFER_METRICS)),
        "versions": version_table(),
    }


def rewritten(page: str, contents: dict[str, str]) -> str:
    """A page with its tables as they should be. Raises ``KeyError`` for an unknown name."""
    return _TABLE.sub(lambda found: found[1] + contents[found[2]] + found[3], page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    is_check = parser.parse_args(arguments).check
    contents, stale = tables(), []
    for name in PAGES:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = rewritten(before, contents)
        if after != before:
            stale.append(name)
            if not is_check:
                path.write_text(after, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'stale; run python scripts/write_tables.py' if is_check else 'written'}")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
