"""Which buffers pair, and one sentence for layouts that cannot."""

from __future__ import annotations

import msgspec
import pytest

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer.layout import are_whole, pair_buffers
from sglang_tiered.transfer.messages import KVLayout, StateLayout

ONE = KVLayout(4, "bfloat16", [128] * 4, [0, 1, 0, 1], 0, 1, 4, [StateLayout("swa", [8])], [24])


def test_the_same_layout_pairs_whole_pages() -> None:
    pairs = pair_buffers(ONE, ONE)
    assert [(one.buffer, other.buffer) for one, other in pairs] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert are_whole(pairs)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 64}, "--page-size 4 and decode 64"),
        ({"dtype": "fp8_e4m3"}, "--kv-cache-dtype bfloat16 and decode fp8_e4m3"),
        ({"codec": "zstd"}, "--transfer-codec none and decode zstd"),
        ({"states": []}, "states swa and decode none"),
        ({"states": [StateLayout("mamba", [8])]}, "states swa and decode mamba"),
        ({"states": [StateLayout("swa", [4])]}, "same --tp-size"),
        ({"aux_bytes": [24, 24]}, "1 metadata buffers and decode 2"),
        ({"layer_ids": [0, 2, 0, 2]}, "KV of layer 1 that decode does not"),
        ({"page_bytes": [64] * 4}, "128 bytes on prefill and 64"),
        ({"page_bytes": [128] * 3}, "inconsistently"),
        ({"tp_rank": 1}, "inconsistently"),
        ({"tp_size": 2, "page_bytes": [100] * 4}, "not a split by heads"),
    ],
)
def test_unpairable_layouts_are_refused_in_one_sentence(
    changes: dict[str, object], says: str
) -> None:
    with pytest.raises(TransferError, match=says) as refusal:
        pair_buffers(ONE, msgspec.structs.replace(ONE, **changes))
    text = str(refusal.value)
    assert text.endswith(".")
    assert text.count(". ") == 0
    assert "\n" not in text


def test_elements_matter_to_a_codec_only() -> None:
    ours, theirs = (msgspec.structs.replace(ONE, element=each) for each in ("float16", "bfloat16"))
    assert pair_buffers(ours, theirs)
    ours, theirs = (msgspec.structs.replace(each, codec="int8") for each in (ours, theirs))
    with pytest.raises(TransferError, match="--dtype float16 and decode bfloat16"):
        pair_buffers(ours, theirs)
