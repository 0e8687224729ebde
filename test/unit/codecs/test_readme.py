"""The worked example of the format page is what the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import sglang_tiered.codecs as package
from sglang_tiered.codecs import CODEC_NAMES, PageLayout, make_codec

NUMBERS = [[1, -2, 0.5, 3], [1.5, 2, -0.25, 448], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_worked_example_differs_from_encoded_bytes() -> None:
    layout = PageLayout.kv(dtype="bfloat16", num_layers=1, page_size=2, num_heads=1, head_dim=4)
    bits = np.array(NUMBERS, np.float32).view(np.uint32) >> 16
    page = bits.astype(np.uint16).tobytes()
    text = (Path(package.__file__).parent / "README.md").read_text()
    example = text[text.index("## Worked example") : text.index("## Measured")]
    for name in CODEC_NAMES[1:]:
        start = example.index(f"    {name} ") + 4 + len(name)
        lines = example[start:].split("\n\n")[0].splitlines()
        found = " ".join(re.match(r"\s*((?:[0-9a-f]{2} )*[0-9a-f]{2})", line)[1] for line in lines)  # type: ignore[index]
        encoded = b"".join(make_codec(name, layout).encode((memoryview(page),)))
        assert found == encoded.hex(" "), name
