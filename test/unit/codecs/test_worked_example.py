"""A page of known numbers is encoded into these bytes: those of version 1 of the format.

One layer, two tokens, one head of four channels, bfloat16. With four channels a head is one group,
and with two tokens ``int8`` too shares one scale among them.
"""

from __future__ import annotations

import numpy as np
import pytest

from sglang_tiered.codecs import CODEC_NAMES, PageLayout, make_codec

KEYS = [[1, -2, 0.5, 3], [1.5, 2, -0.25, 448]]
VALUES = [[0, 1, 2, 3], [4, 5, 6, 7]]
ENCODED = {
    # raw: nothing to gain; keys; values
    "zstd": """
        c5 01 00 02 46 e6 bf 41 20 00 00 00
        80 3f 00 c0 00 3f 40 40 c0 3f 00 40 80 be e0 43
        00 00 80 3f 00 40 40 40 80 40 a0 40 c0 40 e0 40
    """,
    # scales 2**0 and 2**-6; 38 is 1, 7e is 448
    "fp8": """
        c5 01 02 02 46 e6 bf 41 20 00 00 00
        02 00 00 00 80 7a
        10 00 00 00 38 c0 30 44 3c 40 a8 7e 00 68 70 74 78 7a 7c 7e
    """,
    # from -2 by 1.7656; from 0 by 0.02747
    "int8": """
        c5 01 03 02 46 e6 bf 41 20 00 00 00
        08 00 00 00 00 c0 e2 3f 00 00 e1 3c
        10 00 00 00 02 00 01 03 02 02 01 ff 00 24 49 6d 92 b6 da ff
    """,
}


@pytest.mark.parametrize("name", CODEC_NAMES[1:])
def test_worked_example_differs_from_encoded_bytes(name: str) -> None:
    layout = PageLayout.kv(dtype="bfloat16", num_layers=1, page_size=2, num_heads=1, head_dim=4)
    bits = np.array(KEYS + VALUES, np.float32).view(np.uint32) >> 16
    page = bits.astype(np.uint16).tobytes()
    encoded = b"".join(make_codec(name, layout).encode((memoryview(page),)))
    assert encoded.hex(" ") == " ".join(ENCODED[name].split()), name
