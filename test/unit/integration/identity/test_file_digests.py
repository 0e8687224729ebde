"""Every byte of a file counts, is read once, and is read again whenever it may have changed."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_tiered.checksummed import seal
from sglang_tiered.integration.identity import file_digests
from sglang_tiered.integration.identity.file_digests import SETTLED_NS, FileDigests, SeenFile, see
from sglang_tiered.storage.region.format import WEIGHTS_NAME

TIMEOUT_S = 20.0
SIZE = 3 << 20
NEVER = threading.Event()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are young; take their times for those of old ones."""
    monkeypatch.setattr(file_digests, "SETTLED_NS", -1)


def read(memory: Path, *paths: Path) -> tuple[list[bytes | None], int]:
    """Digests as a process of its own finds them, and how many bytes it read for that."""
    digests = FileDigests(memory)
    seen = [see(path) for path in paths]
    found = digests.read(seen, NEVER)
    return [found.get(file) for file in seen], digests.num_bytes_read


def known(memory: Path, file: SeenFile) -> bytes | None:
    return FileDigests(memory).known([file]).get(file)


@pytest.mark.parametrize("position", [0, 7, 4096 + 5, SIZE // 3, SIZE - 4097, SIZE - 1])
def test_one_byte_anywhere_is_another_digest(memory: Path, file: Path, position: int) -> None:
    (before,), _ = read(memory, file)
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    assert read(memory, file)[0] != [before]


def test_second_start_reads_nothing(memory: Path, file: Path) -> None:
    first, num_bytes = read(memory, file)
    assert num_bytes == SIZE
    assert read(memory, file) == (first, 0)
    assert (memory / WEIGHTS_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in memory.iterdir()] == [WEIGHTS_NAME]


def test_edit_with_restored_times_is_read_again(memory: Path, file: Path) -> None:
    (before,), _ = read(memory, file)
    status = file.stat()
    with file.open("r+b") as stream:  # the same inode
        stream.seek(SIZE // 3)
        stream.write(b"edit")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    assert known(memory, see(file)) is None
    digests, num_bytes = read(memory, file)
    assert digests != [before] and num_bytes == SIZE


def test_other_content_with_an_equal_stamp_is_read(memory: Path, file: Path) -> None:
    """Images of read-only file systems are built with times and inodes of their own choice."""
    read(memory, file)
    before = see(file)
    assert known(memory, before) is not None
    content = file.read_bytes()
    file.write_bytes(bytes(SIZE))
    other = see(file)._replace(stamp=before.stamp)
    assert known(memory, other) is None
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("is_read_only", "is_real", "is_trusted"),
    [(True, False, False), (False, False, True), (True, True, True)],
)
def test_times_chosen_by_an_image_are_ignored(
    memory: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_read_only: bool,
    is_real: bool,
    is_trusted: bool,
) -> None:
    """There ctime is what the builder chose, like mtime: a rebuilt image may repeat all of them."""
    flags = SimpleNamespace(f_flag=os.ST_RDONLY if is_read_only else 0)
    monkeypatch.setattr(file_digests.os, "fstatvfs", lambda _: flags)
    if is_real:
        os.utime(file, ns=(1, 1))
    (digest,), _ = read(memory, file)
    seen = see(file)
    assert (seen.stamp.changed_ns == seen.stamp.modified_ns) != is_real
    assert known(memory, seen) == (digest if is_trusted else None)
    assert read(memory, file) == ([digest], 0 if is_trusted else SIZE)


def test_recently_changed_file_is_not_remembered(
    memory: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of its file system's clock it could change again unseen."""
    monkeypatch.setattr(file_digests, "SETTLED_NS", SETTLED_NS)
    os.utime(file)
    assert read(memory, file)[1] == SIZE
    assert not (memory / WEIGHTS_NAME).exists()


@pytest.mark.parametrize(
    "content",
    [b"", seal({"version": 1, "entries": [1, 2]}), seal({"version": 999, "entries": []})],
    ids=["empty", "entries", "newer"],
)
def test_damaged_or_foreign_memory_costs_a_reading(
    memory: Path, file: Path, content: bytes
) -> None:
    (memory / WEIGHTS_NAME).write_bytes(content)
    assert read(memory, file)[1] == SIZE
    assert read(memory, file)[1] == 0


def test_refetched_file_has_a_likely_digest(memory: Path, file: Path, tmp_path: Path) -> None:
    (digest,), _ = read(memory, file)
    seen = see(Path(shutil.copyfile(file, tmp_path / "anew")))
    digests = FileDigests(memory)
    assert digests.known([seen]) == {}
    assert digests.likely([seen]) == {seen: digest}
    with seen.path.open("r+b") as stream:
        stream.write(b"edit")
    assert digests.likely([see(seen.path)]) == {}


def test_stopped_reader_waits_for_no_turn(memory: Path, file: Path) -> None:
    held = os.open(memory, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # another process's turn
    stopped = threading.Event()
    digests = FileDigests(memory)
    thread = threading.Thread(target=digests.read, args=([see(file)], stopped))
    thread.start()
    stopped.set()
    thread.join(TIMEOUT_S)
    os.close(held)
    assert not thread.is_alive() and digests.num_bytes_read == 0
