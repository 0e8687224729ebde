"""``dump``: one line per page stored, or the bytes of one page."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.storage.encoding import page_alone
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import BLOCK_BYTES, padded, region_name
from sglang_tiered.storage.region.walk import read_run
from sglang_tiered.tools.store.report import problem_json, problem_text
from sglang_tiered.tools.store.scan import open_shards, resolve
from sglang_tiered.tools.terminal import note

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sglang_tiered.tools.store.scan import ScannedRegion, ShardReader, StoreTarget


class _DumpedPage(NamedTuple):
    """Describes one page. The order of the fields is that of the columns; digits are
    hexadecimal."""

    shard: str
    region: int
    extent: int
    offset: int
    length: int
    checksum: str
    key: str
    namespace: str


def run(arguments: argparse.Namespace) -> int:
    if (arguments.extract is None) != (arguments.output is None):
        raise ConfigError("--extract KEY and --output FILE go together; pass both or neither")
    if arguments.extract is not None and (arguments.json or arguments.keys):
        raise ConfigError("--extract writes one page to a file; drop --json and --keys")
    target = resolve(arguments.directory)
    readers = open_shards(target, arguments.region)
    if arguments.extract is not None:
        return _extract(target, readers, arguments)
    if not arguments.json:
        print(" ".join(_DumpedPage._fields))
    num_problems = 0
    for reader in readers:
        for view in reader.views(full=False, jobs=arguments.jobs):
            for entry in _entries(reader, view, arguments.keys or "", arguments.namespace or ""):
                shown = json.dumps(entry._asdict()) if arguments.json else None
                print(shown or " ".join(map(str, entry)))
            num_problems += len(view.problems)
            for problem in view.problems:
                note(problem_text(problem_json(reader.shard.name, problem, view)))
    return 1 if num_problems else 0


def _entries(
    reader: ShardReader, view: ScannedRegion, keys: str, namespace: str
) -> Iterator[_DumpedPage]:
    """Yield the pages of a region whose key and namespace begin with these hexadecimal digits."""
    for ordinal, extent in enumerate(view.contents.each()):
        if not extent.namespace.hex().startswith(namespace):
            continue
        place = reader.shard.name, view.sequence, ordinal
        columns = (extent.pages[name].tolist() for name in ("length", "checksum", "key"))
        pages = zip(extent.page_offsets().tolist(), *columns, strict=True)
        for offset, length, checksum, key in pages:
            if key.hex().startswith(keys):
                digits = f"{checksum:016x}", key.hex(), extent.namespace.hex()
                yield _DumpedPage(*place, offset, length, *digits)


def _extract(
    target: StoreTarget, readers: Sequence[ShardReader], arguments: argparse.Namespace
) -> int:
    found: list[_DumpedPage] = []
    for reader in readers:
        for view in reader.views(full=False, jobs=arguments.jobs):
            found += _entries(reader, view, arguments.extract, arguments.namespace or "")
    entry = _newest(found, target, arguments.extract)
    stored = _read(next(one for one in readers if one.shard.name == entry.shard), entry)
    where = f"{entry.shard}, region {entry.region}, offset {entry.offset}"
    if stored is None:
        note(f"page {entry.key} ({where}) does not match its checksum; nothing was written")
        return 1
    page, codec = page_alone(stored)  # as it is in memory, where the store knows that
    remark = "" if page is stored else f", decoded from {stored.nbytes} bytes"
    if codec is not None:
        remark = f", as stored: encoded by {codec}, which takes the model's layout to decode"
    _write(arguments.output, page)
    note(f"{page.nbytes} bytes of page {entry.key} ({where}) verified and written{remark}")
    return 0


def _newest(found: list[_DumpedPage], target: StoreTarget, wanted: str) -> _DumpedPage:
    """Find the one page that is meant: of several copies in a shard the last, which is served."""
    if not found:
        raise StoreError(
            f"no page in {target.path} has a key that begins with {wanted}; "
            "dump without --extract lists what is stored"
        )
    meant = {(entry.key, entry.namespace, entry.shard) for entry in found}
    if len(meant) > 1:
        raise StoreError(
            f"--extract {wanted} means {len(meant)} pages, which dump --keys {wanted} lists; pass "
            "more digits, --namespace, or one shard as PLACE"
        )
    return max(found, key=lambda entry: (entry.region, entry.offset))


def _read(reader: ShardReader, entry: _DumpedPage) -> memoryview | None:
    """Return the bytes of a page as stored; ``None`` when they do not verify."""
    region = f"region {entry.region} of {reader.shard}"
    try:
        fd = reader.device.open(region_name(entry.region))
    except FileNotFoundError:
        raise StoreError(f"{region} was reclaimed while this ran; try again") from None
    buffer = aligned_buffer(max(padded(entry.length), BLOCK_BYTES))
    try:
        if not read_run(reader.device, fd, buffer, entry.offset):
            return None
    except OSError as error:
        raise StoreError(
            f"the page at {entry.offset} of {region} cannot be read ({error.strerror}); check the "
            "disk"
        ) from error
    finally:
        reader.device.close(fd)
    page = buffer[: entry.length]
    names = bytes.fromhex(entry.namespace), bytes.fromhex(entry.key)
    return page if f"{page_checksum(*names, [page]):016x}" == entry.checksum else None


def _write(path: Path, data: memoryview) -> None:
    """Only to a new file: ``x`` follows no link either."""
    is_there = False
    try:
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
            is_there = True
            file.write(data)
    except OSError as error:
        if is_there:
            path.unlink(missing_ok=True)
        raise ConfigError(
            f"--output {path} cannot be written ({error.strerror}); pass a name that does not "
            "exist, in a folder with room for it"
        ) from error
