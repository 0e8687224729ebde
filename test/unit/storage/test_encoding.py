"""How pages are stored in fewer bytes: by one path over all tiers, and only where it pays."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kit.clock import Clock
from kit.runs import blank, make_run, make_soft_run, page_data, select, soft_encoding
from kit.stores import damage
from kit.tiers import close_whole, load, loads, open_region, store
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.codecs import CodecError, PageLayout
from sglang_tiered.storage.base import Reason, Tier
from sglang_tiered.storage.encoding import PageEncoding
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Open = Callable[..., RegionEngine]

MiB = 1 << 20
SIZES = (4096, 100, 65_536, 5000, (40_960, 1, 8191))


@pytest.fixture
def opens(tmp_path: Path) -> Iterator[Open]:
    made: list[RegionEngine] = []

    def make(encoding: PageEncoding | None, **changes: Any) -> RegionEngine:
        if made:
            made[-1].close()
        sizes = {"capacity_bytes": 64 * MiB, "region_bytes": 4 * MiB} | changes
        made.append(open_region(tmp_path / "store", encoding=encoding, **sizes))
        return made[-1]

    yield make
    close_whole(made[-1])


def test_a_region_holds_pages_of_both_kinds(opens: Open) -> None:
    """Codec on, off, and on again over restarts: all comes back, whoever stored it."""
    on, off = soft_encoding(), soft_encoding("none")
    runs = [make_soft_run(seed, SIZES) for seed in range(3)]
    held = 0
    for number, encoding in enumerate((on, off, on)):
        engine = opens(encoding)
        store(engine, runs[number])
        grown = engine.stats().stored_bytes - held
        held += grown
        assert (grown < runs[number].num_bytes) == (encoding is on)
        for run in runs[: number + 1]:
            loads(engine, run)
    assert engine.stats().bytes_loaded == sum(run.num_bytes for run in runs)
    for encoding in (on, off):
        assert encoding.stats().num_decoded > 0
    assert off.stats().num_encoded == 0


def test_a_server_without_a_decoder_misses_them(opens: Open) -> None:
    run = make_soft_run(5, [16_384] * 2)
    store(opens(soft_encoding()), run)
    engine = opens(None)
    target = blank(run)
    assert finished(engine.submit_load(target)) == [Reason.MISS] * 2
    assert page_data(target) == page_data(blank(run)), "buffers of a miss are untouched"
    loads(opens(soft_encoding()), run)


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_damage_of_encoded_bytes_reaches_no_codec(
    opens: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    encoding, run = soft_encoding(), make_soft_run(8, [65_536])
    stored = b"".join(encoding.encode(run.pages[0]))
    monkeypatch.setattr(encoding._codec, "decode", lambda *_: pytest.fail("it was decoded"))
    store(opens(encoding), run)
    damage(tmp_path / "store", stored, place)
    assert load(opens(encoding), run) == [Reason.CORRUPT]


@pytest.mark.parametrize(
    ("error", "reason"), [(CodecError, Reason.CORRUPT), (MemoryError, Reason.IO_ERROR)]
)
def test_verified_bytes_that_do_not_decode_are_hidden(
    opens: Open, caplog: pytest.LogCaptureFixture, error: type[Exception], reason: Reason
) -> None:
    """Or they were found and missed for ever, and never stored again. Without memory they are not
    damaged."""
    encoding = soft_encoding()
    engine = opens(encoding)
    run = make_soft_run(9, [16_384])
    store(engine, run)

    def fail(*_: object) -> None:
        raise error("no memory")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding._codec, "decode", fail)
        assert load(engine, run) == [reason]
        patched.setattr(encoding._codec, "encode", fail)
        store(engine, run)
    assert caplog.text.count("no memory") == 1
    loads(engine, run)


def test_pages_are_left_before_a_store_fails(opens: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is another's then."""
    encoding = soft_encoding()
    encode, failed, at_work = encoding.encode, threading.Event(), threading.Event()
    job_ended, seen = threading.Event(), list[bool]()

    def encode_one(page: Any, **options: Any) -> Any:
        if page[0].nbytes == 8192:
            assert at_work.wait(TIMEOUT_S)
            failed.set()
            raise MemoryError
        at_work.set()
        assert failed.wait(TIMEOUT_S)
        seen.append(job_ended.wait(0.2))
        return encode(page, **options)

    monkeypatch.setattr(encoding, "encode", encode_one)
    engine = opens(encoding)
    job = engine.submit_store(make_soft_run(19, [8192, 16_384]))
    threading.Thread(target=lambda: (finished(job), job_ended.set()), daemon=True).start()
    assert finished(job) == [Reason.OK] * 2
    assert seen == [False]


def test_hanging_reads_hold_up_no_encoding(opens: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what is being placed would hang with them, which nothing sheds."""
    encoding, answers = soft_encoding(), threading.Event()
    engine, run = opens(encoding, num_threads=2), make_soft_run(23, [16_384] * 2)
    store(engine, run)
    readv, hanging = engine._device.readv, threading.Semaphore(0)

    def hangs(*arguments: Any) -> int:
        hanging.release()
        assert answers.wait(TIMEOUT_S)
        return readv(*arguments)

    monkeypatch.setattr(engine._device, "readv", hangs)
    reads = [engine.submit_load(blank(select(run, [page]))) for page in range(2)]
    assert all(hanging.acquire(timeout=TIMEOUT_S) for _ in reads)
    num_encoded = encoding.stats().num_encoded
    job = engine.submit_store(make_soft_run(24, [16_384] * 2))
    eventually(lambda: encoding.stats().num_encoded == num_encoded + 2, "it waits for a reader")
    answers.set()
    assert finished(job) == [Reason.OK] * 2


@pytest.mark.parametrize(("disk_s", "is_on"), [(0.0001, False), (0.01, True)])
def test_a_codec_that_costs_more_goes_off(disk_s: float, is_on: bool) -> None:
    """Not from a few pages, and some go on, or nobody would know when it pays."""
    clock, run = Clock(0.0), make_soft_run(1, [MiB])
    encoding = PageEncoding("zstd", PageLayout.unknown("bfloat16"), tiers=(Tier.NVME,), clock=clock)
    codec: Any = encoding._codec
    encode, decode = codec.encode, codec.decode

    def slow(*arguments: Any) -> Any:
        clock.now += 0.001
        return (encode if len(arguments) == 1 else decode)(*arguments)

    codec.encode = codec.decode = slow

    def num_encoded(num_pages: int) -> int:
        before = encoding.stats().num_encoded
        for _ in range(num_pages):
            stored = memoryview(b"".join(encoding.encode(run.pages[0])))
            encoding.note_write(disk_s * stored.nbytes / MiB, stored.nbytes, 2 * MiB)
            encoding.note_read(Tier.NVME, disk_s * stored.nbytes / MiB, stored.nbytes, 2 * MiB)
            if stored.nbytes < MiB:
                assert encoding.decode(stored, blank(run).pages[0]) is Reason.OK
        return encoding.stats().num_encoded - before

    assert num_encoded(60) == 60
    num_encoded(100)
    assert encoding.stats().is_on == is_on
    assert num_encoded(64) == (64 if is_on else 1)
    assert encoding.encode(run.pages[0], is_full=True) is not run.pages[0], "it saves an eviction"


def test_what_gets_no_shorter_goes_off() -> None:
    """Though nothing of it is ever decoded, or read."""
    encoding, page = soft_encoding(), make_run(1, [MiB]).pages[0]
    for _ in range(70):
        assert encoding.encode(page) is page
    assert not encoding.stats().is_on
