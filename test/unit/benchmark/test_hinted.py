"""A hint is compared only where it brought the conversation, and once it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.samples import make_bench, sample
from serving_bench import hinted
from serving_bench.hinted import AFTER_HINT
from serving_bench.setting import TINY


@pytest.mark.parametrize(("in_memory", "compares"), [(128, True), (64, False)])
def test_a_hint_that_brought_half_is_no_figure(
    tmp_path: Path, in_memory: int, compares: bool
) -> None:
    bench = make_bench(tmp_path, TINY, "tiered")
    one = {
        "stock": [sample(ttft_s=8.0, reusable=128)],
        "tiered": [sample(ttft_s=4.0, reusable=128, storage=128)],
        AFTER_HINT: [sample(ttft_s=1.0, reusable=128, host=in_memory)],
    }
    hinted._report(bench, [one, one])
    found = {name: figure["value"] for name, figure in bench.report.ratios.items()}
    wanted = {"hinted_ttft_over_nvme": 0.25, "hinted_ttft_over_stock": 0.125}
    assert found == (wanted if compares else {})
