"""``gc``: what a store could give back. Plans only, unless told to delete.

Deletes under the locks a server would take, after planning under them, and nothing but files of
the store: region files, and what processes leave behind when they die.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.config import format_bytes
from sglang_tiered.errors import ConfigError, StoreError, StoreForeignError
from sglang_tiered.storage.region.directory import (
    DirectoryLock,
    DirectoryState,
    inspect,
    remove_shards,
)
from sglang_tiered.storage.region.files import (
    IGNORED_NAMES,
    LENDING_NAME,
    MANIFEST_NAME,
    SHARD_PREFIX,
    is_leftover,
    is_shard_file,
    is_tier_temporary,
)
from sglang_tiered.storage.region.format import FORMAT_VERSION
from sglang_tiered.tools.store.report import describe, finish, holder_json, listed
from sglang_tiered.tools.store.scan import ShardReader, identities, totals
from sglang_tiered.tools.store.target import Holder, resolve
from sglang_tiered.tools.terminal import print_lines, print_table, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.storage.region.erase_log import Erased
    from sglang_tiered.tools.store.scan import ScannedRegion
    from sglang_tiered.tools.store.target import Shard, StoreTarget

__all__ = ["run"]

_GEOMETRY = re.compile(r"shard-tp\d+of(\d+)-pp\d+of(\d+)-dp\d+-\d+")


@dataclass(frozen=True)
class _Candidate:
    """Describes what could be given back. ``inode`` makes sure that the file deleted is the one
    that was looked at."""

    path: Path
    kind: str  # region, leftover or shard
    nbytes: int
    reason: str
    inode: int = 0


@dataclass
class _GcPlan:
    candidates: list[_Candidate] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # what looks wrong and is left alone, and why
    namespaces: set[str] = field(default_factory=set)  # all that were seen

    def add(self, path: Path, kind: str, reason: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            is_socket = stat.S_ISSOCK(status.st_mode) and path.name == LENDING_NAME
            if is_socket or stat.S_ISREG(status.st_mode):
                self.candidates.append(
                    _Candidate(path, kind, status.st_size, reason, status.st_ino)
                )
            else:
                self.kept.append(f"{path} is not a regular file")


def run(arguments: argparse.Namespace) -> int:
    target = resolve(arguments.directory)
    with ExitStack() as held:
        locks: dict[str, DirectoryLock] = {}
        if arguments.delete:
            _check_ours(target)
            if target.is_tier:
                held.enter_context(DirectoryLock(target.path))
            target = resolve(arguments.directory)
            for shard in target.shards:
                locks[shard.name] = held.enter_context(DirectoryLock(shard.path))
        plan = _make_plan(target, arguments.keep_namespace, arguments.jobs, owned=arguments.delete)
        failed = _delete(target, plan, locks) if arguments.delete else {}
    report = _report(target, plan, failed, deleted=arguments.delete)
    finish(arguments, report, lambda report: _show(target, report))
    return 1 if failed else 0


def _check_ours(target: StoreTarget) -> None:
    """Raise ``StoreForeignError`` for a shard by itself that holds other files than those of a
    shard and has no tier directory above. A tier directory was checked by its manifest."""
    if target.is_tier:
        return
    path = target.path.resolve()
    with contextlib.suppress(StoreError):
        if path.name.startswith(SHARD_PREFIX) and inspect(path.parent) is DirectoryState.OURS:
            return
    with ShardReader(target.shards[0]) as reader:
        foreign = [n for n in reader.names if not is_shard_file(n) and n not in IGNORED_NAMES]
    if foreign:
        raise StoreForeignError(
            f"{target.path} holds {foreign[0]!a}, which does not belong to the store, and no "
            f"{MANIFEST_NAME} above it says that files in here may be deleted; pass the tier "
            "directory"
        )


def _make_plan(target: StoreTarget, kept: Sequence[str], jobs: int, *, owned: bool) -> _GcPlan:
    """Plan what to give back. ``owned``: all locks are held, so what looks unfinished is."""
    plan = _GcPlan()
    if target.is_tier and (owned or not target.holder().may_write):
        for name in sorted(os.listdir(target.path)):
            if is_tier_temporary(name):
                plan.add(target.path / name, "leftover", "a file that was never finished")
    stored: dict[str, list[ScannedRegion]] = {}
    for shard in target.shards:
        stored[shard.name] = _plan_shard(plan, shard, kept, jobs, owned=owned)
    for prefix in kept:
        if not any(namespace.startswith(prefix) for namespace in plan.namespaces):
            raise ConfigError(
                f"--keep-namespace {prefix} matches nothing stored in {target.path}, so nothing "
                "would be kept; stat lists the namespaces"
            )
    _plan_geometries(plan, target, stored, owned=owned)
    return plan


def _plan_shard(
    plan: _GcPlan, shard: Shard, kept: Sequence[str], jobs: int, *, owned: bool
) -> list[ScannedRegion]:
    with ShardReader(shard, owned=owned) as reader:
        views = list(reader.views(full=False, jobs=jobs))
        in_use, names = reader.holder.may_write, reader.names
    for name in names:
        if is_leftover(name) and not in_use:
            plan.add(shard.path / name, "leftover", "left by a process that died")
        elif not is_shard_file(name):
            plan.kept.append(f"{shard.path / name} does not belong to the store")
    dead = _unserved(views, reader.erased)
    for view in views:
        path = shard.path / view.name
        namespaces = {namespace.hex() for namespace in totals([view])}
        plan.namespaces |= namespaces
        unreadable = [problem.what for problem in view.problems if "cannot be" in problem.what]
        if unreadable:
            # Another version may be able to read it, or this one later.
            plan.kept.append(f"{path} {unreadable[0]}")
        elif view.version is not None and view.version > FORMAT_VERSION:
            plan.kept.append(f"{path} is of format {view.version}, newer than {FORMAT_VERSION}")
        elif view.version is not None:
            plan.add(path, "region", f"format {view.version}, not {FORMAT_VERSION}")
        elif view.header is None and view.problems:
            problem = view.problems[0]
            part = "the file" if problem.part == "file" else f"its {problem.part}"
            plan.add(path, "region", f"{part} {problem.what}")
        elif view.header is not None and not (in_use and view.state == "open"):
            if kept and not any(n.startswith(k) for n in namespaces for k in kept):
                plan.add(path, "region", "holds no page of a namespace to keep")
            elif view.sequence in dead:
                plan.add(path, "region", dead[view.sequence])
            elif not namespaces and not view.problems and not view.torn_bytes:
                plan.add(path, "region", "holds no pages")
    return views


def _unserved(views: Sequence[ScannedRegion], erased: Erased) -> dict[int, str]:
    """Return the regions whose pages are never served again, and why."""
    dead = dict.fromkeys(_superseded(views), "every page of it was stored again later")
    for view in views:
        if len(view.contents.pages) and erased.dead_pages(view.sequence, view.contents).all():
            dead[view.sequence] = "every page of it was purged or forgotten"
    return dead


def _superseded(views: Sequence[ScannedRegion]) -> set[int]:
    """Return the regions whose pages all are in later regions that are sealed and look intact."""
    filled = [view for view in views if len(view.contents.pages)]
    if not filled:
        return set()
    counts = [len(view.contents.pages) for view in filled]
    regions = np.repeat(np.arange(len(filled)), counts)
    counting = np.repeat([view.state == "sealed" for view in filled], counts)
    _, page = np.unique(np.concatenate([identities(view) for view in filled]), return_inverse=True)
    latest = np.full(int(page.max()) + 1, -1)
    np.maximum.at(latest, page[counting], regions[counting])
    again = np.bincount(regions, weights=latest[page] > regions, minlength=len(filled))
    return {
        view.sequence
        for view, number, count in zip(filled, again, counts, strict=True)
        if int(number) == count
    }


def _plan_geometries(
    plan: _GcPlan, target: StoreTarget, stored: dict[str, list[ScannedRegion]], *, owned: bool
) -> None:
    """Plan to delete shards of other parallel sizes, which only a server of the same sizes opens:
    those written last stay, and those in use."""
    by_sizes: dict[tuple[str, str], list[Shard]] = {}
    for shard in target.shards if target.is_tier else ():
        match = _GEOMETRY.fullmatch(shard.name)
        if match is not None:
            by_sizes.setdefault((match[1], match[2]), []).append(shard)
    if len(by_sizes) < 2:
        return

    def last_written(shards: Sequence[Shard]) -> int:
        headers = [view.header for shard in shards for view in stored[shard.name]]
        return max((header.created_ns for header in headers if header is not None), default=0)

    newest = max(by_sizes, key=lambda sizes: last_written(by_sizes[sizes]))
    for (tp_size, pp_size), shards in by_sizes.items():
        used = not owned and any(shard.holder().may_write for shard in shards)
        if (tp_size, pp_size) == newest or used:
            continue
        for shard in shards:
            plan.candidates = [c for c in plan.candidates if c.path.parent != shard.path]
            nbytes = sum(view.file_bytes for view in stored[shard.name])
            reason = (
                f"for tensor parallel {tp_size}, pipeline parallel {pp_size}; those used last are "
                f"{newest[0]} and {newest[1]}"
            )
            plan.candidates.append(_Candidate(shard.path, "shard", nbytes, reason))


def _delete(target: StoreTarget, plan: _GcPlan, locks: dict[str, DirectoryLock]) -> dict[Path, str]:
    """Delete; return what could not be deleted, and why. The locks are held."""
    failed: dict[Path, str] = {}
    touched = set()
    for candidate in plan.candidates:
        if candidate.kind == "shard":
            continue
        try:
            if candidate.path.lstat().st_ino != candidate.inode:
                failed[candidate.path] = "is another file than it was"
                continue
            candidate.path.unlink()
            touched.add(candidate.path.parent)
        except OSError as error:
            failed[candidate.path] = str(error.strerror)
    doomed = {c.path.name: c.path for c in plan.candidates if c.kind == "shard"}
    for name in doomed:
        locks[name].release()  # who removes a shard takes its lock himself
    if doomed:
        try:
            remove_shards(target.path, keep=lambda name: SHARD_PREFIX + name not in doomed)
        except StoreError as error:
            failed |= dict.fromkeys(doomed.values(), str(error))
        for path in doomed.values():
            if path.exists() and path not in failed:
                failed[path] = "is in use, or holds files that do not belong to the store"
        touched.add(target.path)
    for directory in touched:
        with contextlib.suppress(OSError):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    return failed


def _report(
    target: StoreTarget, plan: _GcPlan, failed: dict[Path, str], *, deleted: bool
) -> dict[str, Any]:
    gone = [c for c in plan.candidates if deleted and c.path not in failed]
    return {
        "directory": str(target.path),
        "lock": holder_json(target.holder()),
        "in_use": {s.name: holder_json(s.holder()) for s in target.shards if s.holder().may_write},
        "deleted": deleted,
        "candidates": [
            {
                "path": str(candidate.path),
                "kind": candidate.kind,
                "bytes": candidate.nbytes,
                "reason": candidate.reason,
                "deleted": deleted and candidate.path not in failed,
                "failure": failed.get(candidate.path),
            }
            for candidate in plan.candidates
        ],
        "candidate_bytes": sum(candidate.nbytes for candidate in plan.candidates),
        "deleted_bytes": sum(candidate.nbytes for candidate in gone),
        "kept": plan.kept,
        "notes": list(target.notes),
    }


def _show(target: StoreTarget, report: dict[str, Any]) -> None:
    print_lines(describe(target, Holder(**report["lock"])))
    candidates = report["candidates"]
    if candidates:
        print_table(
            ["what", "path", "why", "bytes"],
            [
                [
                    c["kind"],
                    printable(os.path.relpath(c["path"], target.path)),
                    c["failure"] and f"NOT DELETED: {c['failure']}" or c["reason"],
                    format_bytes(c["bytes"]),
                ]
                for c in candidates
            ],
            left=3,
        )
        print_lines([""])
    print_lines(listed(report["kept"], "left alone: "))
    print_lines(f"note: {text}" for text in report["notes"])
    for name, holder in report["in_use"].items():
        print_lines([f"note: {name} is {Holder(**holder)}; --delete is refused until it ends"])
    num_deleted = sum(candidate["deleted"] for candidate in candidates)
    if report["deleted"]:
        freed = format_bytes(report["deleted_bytes"])
        print_lines([f"deleted {num_deleted} of {len(candidates)}, {freed} given back"])
    elif candidates:
        freed = format_bytes(report["candidate_bytes"])
        print_lines([f"{len(candidates)} could go, {freed}; nothing was deleted (--delete does)"])
    else:
        print_lines(["nothing to give back"])
