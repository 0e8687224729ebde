"""How pages are stored in fewer bytes: by one path over all tiers, and only where it pays."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from shared_tier import SharedTier

from kit.runs import OTHER_NAMESPACE, blank, make_run, make_soft_run, page_data, soft_encoding
from kit.stalls import least_stall
from kit.tiers import close_whole, load, loads, open_region, store
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.codecs import CodecError, PageLayout
from sglang_tiered.storage.base import Erasure, Reason, Run, Tier
from sglang_tiered.storage.encoding import PageEncoding
from sglang_tiered.storage.region import RegionEngine, writer
from sglang_tiered.storage.region.device import FileDevice, aligned_buffer
from sglang_tiered.storage.region.format import BLOCK_BYTES, padded
from sglang_tiered.storage.region.writer import Encoders
from sglang_tiered.storage.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sglang_tiered.storage.base import Page

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


def test_a_page_that_would_grow_is_stored_plain(opens: Open) -> None:
    engine = opens(soft_encoding())
    run = make_run(4, SIZES)
    store(engine, run)
    assert engine.stats().stored_bytes == run.num_bytes
    loads(engine, run)


def test_a_server_without_a_decoder_misses_them(opens: Open) -> None:
    run = make_soft_run(5, [16_384] * 2)
    store(opens(soft_encoding()), run)
    engine = opens(None)
    target = blank(run)
    assert finished(engine.submit_load(target)) == [Reason.MISS] * 2
    assert page_data(target) == page_data(blank(run)), "buffers of a miss are untouched"
    loads(opens(soft_encoding()), run)


def test_a_page_of_another_length_stays_a_miss(opens: Open) -> None:
    """And is not dropped for it: it was not damaged."""
    engine = opens(soft_encoding())
    soft, hard = make_soft_run(6, [16_384]), make_run(7, [4096])
    for run in (soft, hard):
        store(engine, run)
    for key, num_bytes in ((soft.keys[0], 17_000), (soft.keys[0], 1000), (hard.keys[0], 5000)):
        other = Run((key,), ((memoryview(bytearray(b"\xa5" * num_bytes)),),))
        assert finished(engine.submit_load(other)) == [Reason.MISS]
        assert bytes(other.pages[0][0]) == b"\xa5" * num_bytes
    for run in (soft, hard):
        loads(engine, run)


def test_damage_of_encoded_bytes_reaches_no_codec(
    opens: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bit of a page in turn would take long: each of its blocks, and header and end."""
    encoding = soft_encoding()
    run = make_soft_run(8, [65_536])
    stored = b"".join(encoding.encode(run.pages[0]))
    assert len(stored) < 50_000
    places = [0, 1, 2, 8, 12, len(stored) - 1, *range(100, len(stored), 4096)]
    monkeypatch.setattr(encoding._codec, "decode", lambda *_: pytest.fail("it was decoded"))
    for number, place in enumerate(places):
        namespace = number.to_bytes(32, "big")
        engine = opens(encoding, namespace=namespace)
        store(engine, run)
        engine.close()
        files = (tmp_path / "store").glob("region-*")
        (path,) = [each for each in files if stored in each.read_bytes()]
        data = bytearray(path.read_bytes())
        data[bytes(data).index(stored) + place] ^= 1
        path.write_bytes(data)
        engine = opens(encoding, namespace=namespace)
        assert load(engine, run) == [Reason.CORRUPT]
        assert engine.lookup(run.keys).num_hits == 0


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


def test_a_rounded_page_is_never_an_exact_one(opens: Open) -> None:
    layout = PageLayout.kv(dtype="bfloat16", num_layers=2, page_size=64, num_heads=2, head_dim=16)
    page = make_soft_run(10, [layout.page_bytes]).pages[0]
    run = Run((b"k" * 32,), (page,))
    engine = opens(PageEncoding("int8", layout))
    store(engine, run)
    target = blank(run)
    assert finished(engine.submit_load(target)) == [Reason.OK]
    assert page_data(target) != page_data(run)
    exact = opens(PageEncoding("zstd", layout), namespace=OTHER_NAMESPACE)
    assert load(exact, run) == [Reason.MISS]
    same = opens(PageEncoding("zstd", layout))
    assert load(same, run) == [Reason.CORRUPT], "by mistake"


def test_reclaim_moves_encoded_pages_as_they_are(opens: Open, tmp_path: Path) -> None:
    encoding, device = soft_encoding(), watched_device(tmp_path)
    engine = opens(encoding, capacity_bytes=4 * MiB, region_bytes=MiB, device=device)
    kept = make_soft_run(11, [65_536] * 2)
    store(engine, kept)
    seed = 100
    while not engine.stats().num_pages_reinserted:
        loads(engine, kept)
        store(engine, make_run(seed, [65_536] * 4))
        seed += 1
        assert seed < 200
    num_encoded = encoding.stats().num_encoded
    loads(engine, kept)
    assert num_encoded == encoding.stats().num_encoded == 2
    assert device.by_writer and all(device.by_writer), "in whole blocks"


class Held:
    """Calls of a method, which wait until they may go on."""

    def __init__(self, patch: pytest.MonkeyPatch, place: Any, name: str) -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self.inner = getattr(place, name)
        patch.setattr(place, name, self)

    def __call__(self, *arguments: Any) -> Any:
        self.reached.set()
        assert self.goes_on.wait(TIMEOUT_S)
        return self.inner(*arguments)


def test_what_a_load_takes_includes_decoding(opens: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would be taken for cheaper than it is."""
    encoding = soft_encoding()
    engine = opens(encoding)
    run = make_soft_run(13, [16_384])
    store(engine, run)
    decoding = Held(monkeypatch, encoding._codec, "decode")
    ended: list[int] = []
    stack = TierStack(engine)
    stack.observe(Observer(ended))
    job = stack.submit_load(blank(run))
    assert decoding.reached.wait(TIMEOUT_S)
    assert not ended and not job.done
    decoding.goes_on.set()
    assert finished(job) == [Reason.OK]
    assert ended == [run.num_bytes], "bytes of the page, not of what was stored of it"


def test_staging_is_one_span_for_each_thread(opens: Open) -> None:
    engine = opens(soft_encoding(), region_bytes=16 * MiB)
    run = make_soft_run(12, [MiB] * 16)
    store(engine, run)
    taken = []
    reader = engine._reader
    staged = reader._staged

    def watched(wanted: Any) -> Any:
        found = staged(wanted)
        taken.append(reader._staging.memory.nbytes)
        assert taken[-1] >= sum(padded(item.length) for item in wanted)
        return found

    reader._staged = watched  # type: ignore[method-assign]
    loads(engine, run)
    assert taken and max(taken) <= 4 * MiB


class WatchedDevice(FileDevice):
    """Notes of every long read and write whether direct I/O would take all of its memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reads: list[bool] = []
        self.writes: list[bool] = []
        self.by_writer: list[bool] = []

    def readv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        is_writer = threading.current_thread().name == "tier-writer"
        note_memory(self.by_writer if is_writer else self.reads, segments)
        return super().readv(fd, segments, offset)

    def writev(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        note_memory(self.writes, segments)
        return super().writev(fd, segments, offset)


def note_memory(found: list[bool], segments: Sequence[memoryview]) -> None:
    def passes(segment: memoryview) -> bool:
        if segment.readonly or segment.nbytes % BLOCK_BYTES:
            return False
        return ctypes.addressof(ctypes.c_char.from_buffer(segment)) % BLOCK_BYTES == 0

    if sum(segment.nbytes for segment in segments) > 64 << 10:
        found.append(all(map(passes, segments)))


def watched_device(tmp_path: Path) -> WatchedDevice:
    (tmp_path / "store").mkdir()
    return WatchedDevice(tmp_path / "store")


def in_aligned_memory(run: Run) -> Run:
    pages = []
    for page in run.pages:
        memory = aligned_buffer(padded(sum(segment.nbytes for segment in page)))
        memory[:] = b"".join(page)
        pages.append((memory,))
    return Run(run.keys, tuple(pages))


def test_encoded_pages_leave_neighbours_their_direct_path(opens: Open, tmp_path: Path) -> None:
    device = watched_device(tmp_path)
    engine = opens(soft_encoding(), device=device)
    soft, hard = (make(14, [262_144] * 3) for make in (make_soft_run, make_run))
    pages = (soft.pages[0], hard.pages[1], soft.pages[2])
    run = in_aligned_memory(Run(soft.keys, pages))
    store(engine, run)
    assert engine.stats().stored_bytes < run.num_bytes
    target = in_aligned_memory(blank(run))
    assert finished(engine.submit_load(target)) == [Reason.OK] * 3
    assert page_data(target) == page_data(run)
    for found in (device.writes, device.reads):
        assert found and all(found)


def test_demotion_reads_encoded_pages_without_a_copy(
    opens: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it known what they take in memory, by which a codec is judged."""
    encoding, device, bucket = soft_encoding(), watched_device(tmp_path), SharedTier()
    noted: list[object] = []
    monkeypatch.setattr(encoding, "note_read", lambda *figures: noted.append(figures))
    engine = opens(encoding, device=device)
    stack = TierStack(engine, [bucket])
    run = make_soft_run(27, [262_144] * 3)
    assert finished(stack.submit_store(run)) == [Reason.OK] * 3
    eventually(lambda: stack.stack_stats().num_demoted == 3, "they went nowhere")
    assert device.reads and all(device.reads)
    assert not noted
    (below,) = bucket.stored_runs
    assert below.num_bytes == engine.stats().stored_bytes < run.num_bytes
    target = blank(run)
    for (stored,), page in zip(below.pages, target.pages, strict=True):
        assert encoding.decode(stored, page) is Reason.OK
    assert page_data(target) == page_data(run)
    stack.close()


def test_pages_of_an_extent_are_encoded_at_once(
    opens: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one thread would bound what a server stores."""
    encoding = soft_encoding()
    encode, both = encoding._codec.encode, threading.Barrier(2)

    def meet(page: Any) -> Any:
        both.wait(TIMEOUT_S)
        return encode(page)

    monkeypatch.setattr(encoding._codec, "encode", meet)
    engine = opens(encoding)
    run = make_soft_run(15, [16_384] * 2)
    store(engine, run)
    assert encoding.stats().num_encoded == 2
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


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory")], ids=repr)
def test_what_cannot_be_encoded_is_stored_plain(
    opens: Open, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """And neither is the next store dropped, nor does the disk count as sick."""

    def fail(num_bytes: int) -> memoryview:
        raise error

    engine = opens(soft_encoding())
    runs = [make_soft_run(22, [16_384] * 2), make_soft_run(23, [16_384] * 2)]
    with monkeypatch.context() as patched:
        patched.setattr(writer, "aligned_buffer", fail)
        for job in [engine.submit_store(run) for run in runs]:
            assert finished(job) == [Reason.OK] * 2
    assert engine.stats().stored_bytes == sum(run.num_bytes for run in runs)
    store(engine, make_soft_run(24, [16_384]))
    for run in runs:
        loads(engine, run)


def test_pages_that_save_no_block_stay_plain(opens: Open) -> None:
    """They would only cost a decoding."""
    encoding = soft_encoding()
    engine = opens(encoding)
    store(engine, make_soft_run(25, [4096, 8192]))
    assert encoding.stats().num_encoded == 0
    store(engine, make_soft_run(26, [12_288]))
    assert encoding.stats().num_encoded == 1


def test_others_run_while_an_extent_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, memory = soft_encoding(), memoryview(bytearray(64 * MiB))
    monkeypatch.setattr(encoding, "encode", lambda *_, **__: (memory[16:],))
    threads = Encoders(encoding)
    assert least_stall(lambda: threads.encode([(memory,)], is_full=False), 0.5) <= 0.5
    threads.close()


_STORES_AT_EXIT = """
import atexit, sys
from pathlib import Path
from kit.runs import NAMESPACE, make_soft_run, soft_encoding
from kit.waiting import finished
from sglang_tiered.storage.region import RegionEngine

engine = RegionEngine(
    Path(sys.argv[1]), namespace=NAMESPACE, capacity_bytes=8 << 20, region_bytes=1 << 20,
    encoding=soft_encoding(),
)

@atexit.register
def end():
    print(*finished(engine.submit_store(make_soft_run(20, [16_384] * 2))))
    engine.close()
"""


def test_pages_stored_at_exit_are_encoded(tmp_path: Path) -> None:
    """No pool of ``concurrent.futures`` takes work by then."""
    program = [sys.executable, "-c", _STORES_AT_EXIT, str(tmp_path / "store")]
    ended = subprocess.run(
        program,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert ended.stdout.split() == [str(Reason.OK)] * 2, ended.stderr


def test_no_encoder_outlives_its_store(opens: Open) -> None:
    def num_encoders() -> int:
        return sum(each.name.startswith("tier-encoder") for each in threading.enumerate())

    engine = opens(soft_encoding())
    store(engine, make_soft_run(21, [8192]))
    assert num_encoders() == 4
    engine.close()
    assert num_encoders() == 0
    opens(soft_encoding("none"))
    assert num_encoders() == 0


def test_an_erasure_during_encoding_hides_the_page(
    opens: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = soft_encoding()
    encoding_it = Held(monkeypatch, encoding._codec, "encode")
    engine = opens(encoding)
    run = make_soft_run(17, [16_384] * 2)
    job = engine.submit_store(run)
    assert encoding_it.reached.wait(TIMEOUT_S)
    erased = engine.erase(Erasure.of(run.keys[:1]))
    encoding_it.goes_on.set()
    assert erased.result(TIMEOUT_S)
    finished(job)
    assert engine.contains(run.keys) == [False, True]
    assert opens(encoding).contains(run.keys) == [False, True]


class Observer:
    """Notes the bytes of reads that ended."""

    def __init__(self, ended: list[int]) -> None:
        self.ended = ended

    def begin_read(self, num_bytes: int, tier: Tier) -> int:
        assert tier is Tier.NVME
        return num_bytes

    def end_read(self, reading: int, *, is_complete: bool) -> None:
        assert is_complete
        self.ended.append(reading)


def watched_encoding() -> tuple[PageEncoding, list[bool]]:
    """With whether the store was full at each page."""
    encoding, seen = soft_encoding(), list[bool]()
    encode = encoding.encode

    def watched(page: Page, *, is_full: bool = False) -> Page:
        seen.append(is_full)
        return encode(page, is_full=is_full)

    encoding.encode = watched  # type: ignore[method-assign]
    return encoding, seen


def test_a_full_store_encodes_whatever_it_costs(opens: Open) -> None:
    """An evicted page is computed again."""
    encoding, seen = watched_encoding()
    engine = opens(encoding, capacity_bytes=4 * MiB, region_bytes=MiB)
    for seed in range(200, 300):
        store(engine, make_soft_run(seed, [65_536] * 4))
        if engine.stats().num_pages_evicted:
            break
    assert (seen[0], seen[-1]) == (False, True)
    assert engine.erase(Erasure()).result(TIMEOUT_S)
    store(engine, make_soft_run(300, [65_536]))
    assert not seen[-1], "there is room again"


class FullDisk(FileDevice):
    """Has room for a few regions, whatever the cap is."""

    def create(self, name: str, nbytes: int) -> int:
        if sum(each.startswith("region-") for each in self.list_names()) >= 3:
            raise OSError(errno.ENOSPC, "no space left")
        return super().create(name, nbytes)


@pytest.mark.parametrize("bound", ["disk", "share"])
def test_a_full_disk_or_share_counts_as_full(opens: Open, tmp_path: Path, bound: str) -> None:
    """Region after region, or the codec would go on and off."""
    encoding, seen = watched_encoding()
    options: dict[str, Any] = {"max_tenant_bytes": 3 * MiB}
    if bound == "disk":
        (tmp_path / "store").mkdir()
        options = {"device": FullDisk(tmp_path / "store")}
    engine = opens(encoding, region_bytes=MiB, **options)
    evicted_at = 0
    for seed in range(200, 260):
        run = make_soft_run(seed, [65_536] * 4)
        store(engine, Run(run.keys, run.pages, b"t" * 16))
        evicted_at = evicted_at or (len(seen) if engine.stats().num_pages_evicted else 0)
    assert engine.stats().physical_bytes < engine.stats().capacity_bytes // 2
    assert not seen[0]
    assert 0 < evicted_at < len(seen) // 2
    assert all(seen[evicted_at:])


def test_reads_and_writes_are_judged_by_memory(
    opens: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, seen = soft_encoding(), list[tuple[int, int]]()
    monkeypatch.setattr(encoding, "note_read", lambda tier, *figures: seen.append(figures[1:]))
    monkeypatch.setattr(encoding, "note_write", lambda *figures: seen.append(figures[1:]))
    engine = opens(encoding)
    run = make_soft_run(18, [MiB])
    store(engine, run)
    loads(engine, run)
    assert len(seen) == 2
    assert all(num_bytes < MiB == memory_bytes for num_bytes, memory_bytes in seen)
