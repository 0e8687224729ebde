"""Numbers that come back further off than the codec says, and pages it must not touch."""

from __future__ import annotations

import pytest
import torch

from sglang_tiered.codecs import (
    LOSSY_CODEC_NAMES,
    CodecError,
    PageCodec,
    PageLayout,
    SegmentLayout,
    make_codec,
)
from sglang_tiered.codecs.base import float32_to_bytes
from sglang_tiered.codecs.encoded import HEADER_BYTES, METHOD_FP8, METHOD_INT8, unpack_header
from sglang_tiered.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
METHODS = {"fp8": METHOD_FP8, "int8": METHOD_INT8}


def column(dtype: str, num_tokens: int, num_channels: int) -> PageLayout:
    """One layer, one head, one segment."""
    shape = (1, num_tokens, 1, num_channels)
    axes = ("layer", "token", "head", "channel")
    return PageLayout(dtype=dtype, segments=(SegmentLayout(axes, shape),))


def through(codec: PageCodec, values: torch.Tensor, *, expect_lossy: bool = True) -> torch.Tensor:
    """Values of a page, encoded and decoded."""
    plain = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    data = b"".join(codec.encode((memoryview(plain),)))
    is_lossy = unpack_header(memoryview(data)).method == METHODS[codec.name]
    assert is_lossy is expect_lossy
    back = bytearray(b"\xa5" * plain.nbytes)
    codec.decode(memoryview(data), (memoryview(back),))
    return torch.frombuffer(back, dtype=values.dtype).reshape(values.shape)


def reference_fp8(group: torch.Tensor) -> torch.Tensor:
    """Torch's rounding with the least power of two that brings the group within 448."""
    exact = group.to(torch.float64)
    largest = exact.abs().max().item()
    exponent = 0
    while largest * 2.0**-exponent > 448:
        exponent += 1
    while exponent > -110 and largest * 2.0 ** -(exponent - 1) <= 448:
        exponent -= 1
    scaled = (exact * 2.0**-exponent).to(torch.float32)
    assert torch.equal(scaled.to(torch.float64), exact * 2.0**-exponent)
    codes = scaled.to(torch.float8_e4m3fn)
    return (codes.to(torch.float64) * 2.0**exponent).to(group.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-20, -3, 0, 1, 9])
def test_fp8_rounds_as_torch_does(dtype: str, exponent: int) -> None:
    """Every pattern of 16 upper bits in six binades and the subnormal ones below, with ties."""
    if dtype == "float16":
        exponent = max(exponent, -3)
    upper = torch.arange(0x3A00, 0x4000, dtype=torch.int32)
    patterns = torch.cat([upper, upper | 0x8000]) << 16
    values = patterns.view(torch.float32) * 2.0**exponent
    if dtype == "float32":  # just beside every tie
        values = torch.cat([values, torch.nextafter(values, values * 2), values * (1 - 2.0**-23)])
    rows = values.to(getattr(torch, dtype)).reshape(-1, 16)
    codec = make_codec("fp8", column(dtype, len(rows), 16))
    assert torch.equal(through(codec, rows), reference_fp8(rows))


def test_fp8_groups_are_scaled_one_by_one() -> None:
    rows = torch.randn(8, 40, generator=torch.Generator().manual_seed(1))
    rows = (rows * 2.0 ** -(16 * (torch.arange(40) // 16))).bfloat16()
    back = through(make_codec("fp8", column("bfloat16", 8, 40)), rows)
    for start in range(0, 40, 16):
        expected = reference_fp8(rows[:, start : start + 16])
        assert torch.equal(back[:, start : start + 16], expected)


def test_float32_becomes_bfloat16_as_in_torch() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(7))
    bits = values.view(torch.int32)
    bits[::2] = bits[::2] & ~0xFFFF | 0x8000  # ties
    plain = torch.from_numpy(float32_to_bytes(values.numpy(), "bfloat16"))
    assert torch.equal(plain.view(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_errs_by_half_a_step_at_most(dtype: str) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(64, 48, generator=generator)
    values *= torch.exp2(torch.randint(-6, 6, (48,), generator=generator))
    values += 20 * torch.randn(48, generator=generator)
    values[:, 3] = 7.25  # the same everywhere
    values[:, 4] = 0
    rows = values.to(getattr(torch, dtype))
    back = through(make_codec("int8", column(dtype, 64, 48)), rows).double()
    exact = rows.double()
    low, high = exact.min(0).values, exact.max(0).values
    largest = torch.maximum(low.abs(), high.abs())
    # The ends of the range are rounded outwards to 8 bits; the result to the type's.
    step = (high - low + largest / 128) / 255 * (1 + 1 / 128)
    ulp = {"float32": 2.0**-22, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    assert ((back - exact).abs() <= step / 2 * 1.0001 + largest * ulp).all()
    assert torch.equal(back[:, 4], exact[:, 4])


@pytest.mark.parametrize("name", LOSSY_CODEC_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "largest"])
def test_value_that_cannot_be_scaled_stays_exact(name: str, dtype: str, value: float | str) -> None:
    kind = getattr(torch, dtype)
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(3)).to(kind)
    rows[10, 3] = torch.finfo(kind).max if isinstance(value, str) else value
    codec = make_codec(name, column(dtype, 64, 16))
    back = through(codec, rows, expect_lossy=False)
    assert torch.equal(back.view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("fp8", -1, 0x7F),  # a code that is not a number
        ("fp8", -1, 0xFF),
        ("fp8", HEADER_BYTES + 4, 0xFF),  # a scale beyond all
        ("int8", HEADER_BYTES + 5, 0x7F),  # the least value infinite, or not a number
        ("int8", HEADER_BYTES + 7, 0xBF),  # a negative step
        ("int8", HEADER_BYTES + 7, 0x7F),
    ],
)
def test_bytes_never_written_do_not_decode(name: str, place: int, value: int) -> None:
    codec = make_codec(name, column("bfloat16", 1, 16))
    # Of so few numbers nothing is compressed: a chunk is its length and its bytes.
    page = torch.arange(16, dtype=torch.bfloat16).view(torch.uint8).numpy()
    data = bytearray(b"".join(codec.encode((memoryview(page),))))
    back = memoryview(bytearray(page.nbytes))
    codec.decode(memoryview(data), (back,))
    data[place] = value
    with pytest.raises(CodecError, match="never written|not a number"):
        codec.decode(memoryview(data), (back,))


AXES = {  # in memory, of: K or V, layer, token, head, channel
    "page_first": (0, 2, 1, 3, 4),
    "page_head": (0, 3, 2, 1, 4),
    "layer_first": (1, 0, 2, 3, 4),
}


@pytest.mark.parametrize("name", LOSSY_CODEC_NAMES)
@pytest.mark.parametrize("order", AXES)
def test_order_of_axes_changes_no_number(name: str, order: str) -> None:
    lengths = {"num_layers": 3, "page_size": 32, "num_heads": 2, "head_dim": 24}
    places = torch.arange(2 * 3 * 32 * 2 * 24).reshape(2, 3, 32, 2, 24)
    numbers = torch.randn(places.numel(), generator=torch.Generator().manual_seed(5))
    numbers *= torch.exp2(places.reshape(-1) % 24 % 7)
    direct = through(make_codec(name, PageLayout.kv(dtype="float32", **lengths)), numbers)
    other = make_codec(name, PageLayout.kv(dtype="float32", **lengths, order=order))
    moved = places.permute(AXES[order]).reshape(-1)
    assert torch.equal(through(other, numbers[moved]), direct[moved])


@pytest.mark.parametrize("name", LOSSY_CODEC_NAMES)
@pytest.mark.parametrize("order", ["page_first_direct", "page_first", "layer_first"])
def test_latent_page_is_quantized(name: str, order: str) -> None:
    layout = PageLayout.latent(dtype="bfloat16", num_layers=2, page_size=64, dim=72, order=order)
    assert layout.page_bytes == 2 * 64 * 72 * 2
    values = torch.randn(2 * 64 * 72, generator=torch.Generator().manual_seed(6)).bfloat16()
    back = through(make_codec(name, layout), values)
    assert (back - values).abs().max() < 0.2


LENGTHS = {"num_layers": 1, "page_size": 64, "num_heads": 1, "head_dim": 64}
FLOAT8 = PageLayout.kv(dtype="float8_e4m3fn", **LENGTHS)
UNREADABLE = {
    **{(name, "is not known"): PageLayout.unknown("bfloat16") for name in LOSSY_CODEC_NAMES},
    **{(name, "this one holds float8"): FLOAT8 for name in LOSSY_CODEC_NAMES},
    **{(name, "the codec is"): PageLayout.unknown() for name in ("gzip", "none", "")},
}


@pytest.mark.parametrize(("name", "sentence"), UNREADABLE)
def test_page_that_a_codec_cannot_read_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_codec(name, UNREADABLE[name, sentence])


def test_layouts_have_different_digests() -> None:
    lengths = {"num_layers": 2, "page_size": 16, "num_heads": 2, "head_dim": 16}
    layouts = [
        PageLayout.kv(dtype=dtype, **lengths, order=order)
        for dtype in DTYPES
        for order in ("page_first_direct", "page_first", "page_head", "layer_first")
    ] + [PageLayout.unknown(dtype) for dtype in (*DTYPES, "uint8")]
    assert len({layout.digest for layout in layouts}) == len(layouts)
