"""The command line of ``sglang-tiered store``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.base import KEY_BYTES
from sglang_tiered.storage.bucket.names import ROOT
from sglang_tiered.storage.region.format import parse_region_name
from sglang_tiered.tools.terminal import Parser, run_program

if TYPE_CHECKING:
    from collections.abc import Sequence


_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PROGRAM = "sglang-tiered store"
_DESCRIPTION = """\
Looks into the directory of the NVMe tier, or into the object tier, and checks it; of
the latter, gives space back.

PLACE is the --tier-dir of a server or one of the shard-* directories in it; or, for
stat and verify, the URL of an object tier (s3://bucket/prefix, gs://, az://, or the
path of a shared directory), with credentials from the environment; gc takes only that.
Nothing is written, locked or removed, unless gc is told to --delete; everything works
while servers use it.
"""
_EPILOG = """\
exit code:
  0  fine
  1  something is wrong: damage was found
  2  a command line or a directory that cannot be used; one sentence says why

%(prog)s COMMAND --help tells more of each command.
"""
_STAT = """\
What every shard holds: regions, pages and bytes by namespace and by tenant, how much
of the disk space is payload, how old the oldest and the newest region are, and who
holds the lock. "superseded" pages were stored again later, "purged" ones, with those
forgotten one by one, are never served; "used" is payload over disk space. A tenant is
a digest of its names. "tokens" are those that a lookup can hit, where the server that
stored them noted how many a page holds; the ranks of one server hold the same ones.
"ratio" is how many bytes in memory a codec keeps in one. Both are told by the lengths
of pages: "-" where pages of several lengths were encoded.

Reads headers and footers, and the one region being written. Payloads of sealed
regions are checked by verify.

Of a URL: pages, bytes and age by namespace, from listings and what says which pages are
erased; tokens with --tier-dir, as above.
"""
_VERIFY = """\
As stat, and reads everything and checks it: region headers, trailers, footers against
the extent headers, every page against its checksum, and what says which pages are
erased or pinned. Bypasses the page cache, or drops from it what was read. A bar with the speed
shows on a terminal.

What a server is writing at the moment, or a crash cut short, is a note, not damage. A
server never serves a damaged page: it is a miss, and computed again.

Of a URL: every page against the checksum in its name. This reads all there is,
which a bucket may charge for.
"""
_DUMP = """\
One line per page: shard, region, extent ordinal, offset in the region, length,
checksum, key, namespace. A key stored again has a line for each copy; the last one
is served. With --json each line is an object.

--extract writes one page to a new file, once it is verified: decoded, but for one of
a lossy codec, which takes the model's layout.
"""
_GC = """\
What could be given back, which servers collect in the background as well. Pages older
than --ttl, the oldest beyond --max-bytes of each namespace, erased ones, pins that are
over, and namespaces that no server has used for seven days; and beside that all that
versions with another format wrote. Prints the plan; --delete deletes. Safe beside
servers and other runs.

A directory of the NVMe tier needs none: its server gives back pages of no use.
"""
_EXAMPLES = {
    "stat": "  {0} stat /nvme/kv\n  {0} stat /nvme/kv --json | jq .total.pages\n"
    "  {0} stat s3://bucket/kv",
    "verify": "  {0} verify /nvme/kv\n  {0} verify /nvme/kv/shard-tp0of1-pp0of1-dp0-0 --region 17\n"
    "  {0} verify s3://bucket/kv --jobs 8",
    "dump": "  {0} dump /nvme/kv | head\n"
    "  {0} dump /nvme/kv --keys 3f9a --namespace 00c1\n"
    "  {0} dump /nvme/kv --extract 3f9a07 --output page.bin",
    "gc": "  {0} gc s3://bucket/kv\n  {0} gc s3://bucket/kv --ttl 14d --max-bytes 20TiB --delete",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    return run_program(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = make_parser().parse_args(arguments)
    if not _URL.match(options.place) and _is_bucket(Path(options.place)):
        options.place = Path(options.place).absolute().as_uri()
    options.directory = Path(options.place)
    is_bucket = _URL.match(options.place) is not None
    if is_bucket and options.command == "dump":
        raise ConfigError("dump is for a directory of the NVMe tier; a URL has stat, verify, gc.")
    if not is_bucket and options.command == "gc":
        raise ConfigError(
            "gc is for the URL of an object tier; a server of a directory of the NVMe tier gives "
            "back pages of no use itself."
        )
    # Imported late: --help and a mistyped flag need neither the engine nor its dependencies.
    if is_bucket:
        from sglang_tiered.tools.store import bucket

        return bucket.run(options)
    from sglang_tiered.tools.store import dump, shards

    return dump.run(options) if options.command == "dump" else shards.run(options)


def _is_bucket(directory: Path) -> bool:
    """Whether a directory is an object tier, which a server takes by its path."""
    with contextlib.suppress(OSError):
        return any(_NAMESPACE.fullmatch(name) for name in os.listdir(directory / ROOT))
    return False


def make_parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=_PROGRAM, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=layout)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )

    def add(name: str, line: str, text: str, place: str) -> argparse.ArgumentParser:
        examples = textwrap.dedent(f"examples:\n{_EXAMPLES[name].format(_PROGRAM)}")
        command = commands.add_parser(
            name, help=line, description=text, epilog=examples, formatter_class=layout
        )
        command.add_argument("place", metavar="PLACE", help=place)
        command.add_argument(
            "--json", action="store_true", help="print JSON instead of a table for people"
        )
        return command

    a_store = "a server's --tier-dir, or one of its shard-* directories"
    a_place = f"{a_store}; or the URL of an object tier"
    stat = add("stat", "what a store holds and who uses it", _STAT, a_place)
    stat.add_argument(
        "--tier-dir",
        metavar="DIR",
        type=Path,
        help="of a URL: count tokens by what a server with this directory noted of its pages",
    )
    verify = add("verify", "check every byte against its checksum", _VERIFY, a_place)
    dump = add("dump", "list every page, or extract one", _DUMP, a_store)
    a_url = "the URL of an object tier"
    gc = add("gc", "what could be given back; deletes only when told to", _GC, a_url)
    for command in (stat, verify, dump):
        command.add_argument(
            "--jobs",
            metavar="N",
            type=_positive,
            default=min(4, os.cpu_count() or 1),
            help="regions read at a time (default: %(default)s)",
        )
        command.add_argument(
            "--region",
            metavar="N",
            type=_region,
            help="only this region: its number (17 or 0x11) or file name",
        )
    verify.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show the bar, or do not (default: on a terminal)",
    )
    for flag, metavar, text in (
        ("--keys", "HEX", "only keys that begin with these digits"),
        ("--namespace", "HEX", "only namespaces that begin with these digits"),
    ):
        dump.add_argument(flag, metavar=metavar, type=_prefix, help=text)
    dump.add_argument(
        "--extract", metavar="KEY", type=_prefix, help="the page whose key begins with these digits"
    )
    dump.add_argument(
        "--output", metavar="FILE", type=Path, help="where to; a file that does not exist yet"
    )
    gc.add_argument("--ttl", metavar="AGE", help="pages older than this go; as 14d, 12h or 30m")
    gc.add_argument("--max-bytes", metavar="SIZE", help="the oldest of a namespace beyond it go")
    gc.add_argument("--delete", action="store_true", help="delete what the plan lists")
    return parser


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 9999")
    return int(text)


def _region(text: str) -> int:
    named = parse_region_name(Path(text).name)
    if named is not None:
        return named
    if re.fullmatch(r"[0-9]{1,19}|0x[0-9a-fA-F]{1,16}", text):
        sequence = int(text, 0) if text.startswith("0x") else int(text)
        if sequence < 1 << 63:
            return sequence
    raise argparse.ArgumentTypeError(f"{text!r} is not the number of a region, nor its file name")


def _prefix(text: str) -> str:
    """Hexadecimal digits of a key or namespace, from its start, in lower case."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{1,{2 * KEY_BYTES}}}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to {2 * KEY_BYTES} hexadecimal digits")
    return text.lower()


if __name__ == "__main__":
    sys.exit(main())
