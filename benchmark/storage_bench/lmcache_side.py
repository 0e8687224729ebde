"""LMCache's local backends as sides of a comparison, each in a process of its own Python."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_bench.figures import DifferentBytesError
from storage_bench.own_engine import NUM_READERS, NUM_WRITERS, PAGES_PER_RUN
from storage_bench.sides import Cost, Side

if TYPE_CHECKING:
    from storage_bench.host_memory import HostPages


LMCACHE_KINDS = ("fs", "fs_native", "raw_block")
_SCRIPT = Path(__file__).with_name("lmcache_process.py")


class LMCacheError(Exception):
    """The peer cannot be measured here; the text says why."""


def lmcache_version(python: Path) -> str:
    """Raises ``LMCacheError`` when that Python has no lmcache."""
    code = "import importlib.metadata as m; print(m.version('lmcache'))"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LMCacheError(f"{python} has no lmcache") from error
    return result.stdout.strip()


class LMCacheSide(Side):
    """One adapter. Its process has noise of its own to store, and compares what it loads."""

    def __init__(self, python: Path, kind: str, folder: Path, source: HostPages) -> None:
        self.name = f"lmcache_{kind}"
        # Between loads its process fills and compares with torch, whose threads would otherwise
        # spin on into the load: processor time that is not LMCache's, and cores that never sleep.
        passive = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [python, _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=passive,
        )
        try:
            self._call(
                "open",
                kind=kind,
                folder=str(folder),
                page_bytes=source.page_bytes,
                pages_per_run=PAGES_PER_RUN,
                num_runs=source.num_pages // PAGES_PER_RUN,
                num_readers=NUM_READERS,
                num_writers=NUM_WRITERS,
            )
            self.forget(-1)  # makes the adapter, which may refuse
        except LMCacheError:
            self.close()
            raise

    def forget(self, sample: int) -> None:
        self._call("forget", sample=sample)

    def store(self) -> Cost:
        return Cost(**self._call("store"))

    def load(self) -> Cost:
        answer = self._call("load")
        if answer.get("different"):
            raise DifferentBytesError(f"{self.name} returned other bytes than it was given")
        return Cost(**answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"call": name, **arguments}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise LMCacheError(f"{self.name}: its process ended before {name}") from None
        line = self._process.stdout.readline()
        if not line:
            raise LMCacheError(f"{self.name}: its process ended during {name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LMCacheError(f"{self.name}: {answer['error']}")
        return answer
