"""A codec that costs more than it saves and stays on, or pays and goes off."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kit.clock import Clock
from kit.runs import blank, make_run, make_soft_run, soft_encoding
from sglang_tiered.codecs import PageLayout
from sglang_tiered.storage.base import Reason, Tier
from sglang_tiered.storage.encoding import PageEncoding

MiB = 1 << 20
FAST_DISK: dict[str, Any] = {"codec_s": 0.001, "disk_s": 0.0001, "tier": Tier.NVME}
SLOW_DISK: dict[str, Any] = {"codec_s": 0.001, "disk_s": 0.01, "tier": Tier.NVME}


class Paced:
    """A codec of speeds that the test sets, and a disk likewise."""

    def __init__(self, *tiers: Tier) -> None:
        self.clock = Clock(0.0)
        self.encoding = PageEncoding(
            "zstd", PageLayout.unknown("bfloat16"), tiers=tiers, clock=self.clock
        )
        codec: Any = self.encoding._codec
        self.codec_s = 0.0  # a MiB, either way
        encode, decode = codec.encode, codec.decode

        def slow_encode(page: Any) -> Any:
            self.clock.now += self.codec_s
            return encode(page)

        def slow_decode(stored: Any, page: Any) -> None:
            self.clock.now += self.codec_s
            decode(stored, page)

        codec.encode, codec.decode = slow_encode, slow_decode
        self.run = make_soft_run(1, [MiB])
        self.target = blank(self.run)

    def move(
        self, num_pages: int, *, codec_s: float, disk_s: float, tier: Tier, io_bytes: int = 2 * MiB
    ) -> int:
        """Store and load pages of a MiB, with others that take so much in memory; returns how many
        were encoded."""
        self.codec_s = codec_s
        before = self.encoding.stats().num_encoded
        for _ in range(num_pages):
            stored = memoryview(b"".join(self.encoding.encode(self.run.pages[0])))
            took_s = disk_s * stored.nbytes / MiB
            self.encoding.note_write(took_s, stored.nbytes, io_bytes)
            self.encoding.note_read(tier, took_s, stored.nbytes, io_bytes)
            if stored.nbytes < MiB:
                assert self.encoding.decode(stored, self.target.pages[0]) is Reason.OK
        return self.encoding.stats().num_encoded - before


def test_a_codec_that_costs_more_goes_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    paced = Paced(Tier.NVME)
    assert paced.move(60, **FAST_DISK) == 60, "nothing is concluded from little"
    paced.move(100, **FAST_DISK)
    assert not paced.encoding.stats().is_on
    assert paced.move(256, **FAST_DISK) == 4, "some go on, or nobody would know when it pays"
    assert "zstd is off" in caplog.text
    paced.move(3000, **SLOW_DISK)
    assert paced.encoding.stats().is_on
    assert paced.move(64, **SLOW_DISK) == 64
    assert [record.message.count("the codec zstd is") for record in caplog.records] == [1, 1]


def test_what_gets_no_shorter_goes_off() -> None:
    """Though nothing of it is ever decoded, or read."""
    encoding, page = soft_encoding(), make_run(1, [MiB]).pages[0]
    for _ in range(70):
        assert encoding.encode(page) is page
    assert not encoding.stats().is_on


def test_a_full_store_keeps_the_codec_on() -> None:
    paced = Paced(Tier.NVME)
    paced.move(200, **FAST_DISK)
    page, encoding = paced.run.pages[0], paced.encoding
    assert not encoding.stats().is_on
    for is_full in (True, False):
        assert (encoding.encode(page, is_full=is_full) is not page) == is_full
        assert encoding.stats().is_on == is_full
