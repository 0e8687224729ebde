"""``Recorder``: what was asked of a front, as a trace in Mooncake's format: times, lengths and
names of the prompts' blocks, no text. ``sglang-tiered trace`` reads it.

Blocks are named under a secret of this process, so that nobody finds out from the file what a
prompt said; equal prompts have equal names until the next start. The length of an answer does not
come through here: the most that was asked for stands in its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING

import aiofiles

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import MiB
from sglang_tiered.request_log import older, open_log
from sglang_tiered.route.prompt import page_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_tiered.route.prompt import Prompt


BLOCK_TOKENS = 512
MAX_WAITING = 10_000
MAX_BYTES = 256 * MiB

logger = logging.getLogger(__name__)


class Recorder:
    """Writes to ``path``, which is renamed to ``path.1`` when it is full. Of one event loop. Raises
    ``ConfigError`` for a file that cannot be written."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            os.close(open_log(path))
        except OSError as error:
            raise ConfigError(
                f"--record {path} cannot be written ({error.strerror}); name a file in a directory "
                "that exists, or drop it."
            ) from error
        self._path, self._max_bytes, self._clock = path, max_bytes, clock
        self._started_s = clock()
        self._secret = secrets.token_hex(16)
        self._waiting: asyncio.Queue[tuple[float, Prompt]] = asyncio.Queue(MAX_WAITING)
        self.num_dropped = 0
        """Requests that are not in the file: too many came, or their tokens are not known."""

    def note(self, prompt: Prompt) -> None:
        """Have a request written. Waits for nothing."""
        if prompt.ids is None or self._waiting.full():
            self.num_dropped += 1
        else:
            self._waiting.put_nowait((self._clock() - self._started_s, prompt))

    async def run(self) -> None:
        """Write until cancelled. What is not written then is lost."""
        while True:
            try:
                await self._fill()
                os.replace(self._path, older(self._path))
            except OSError as error:
                logger.warning("--record %s ends here: %s", self._path, error.strerror)
                return

    async def _fill(self) -> None:
        """Append to the file until it is full."""
        async with aiofiles.open(open_log(self._path), "ab", buffering=0) as file:
            num_bytes = await file.seek(0, os.SEEK_END)
            while num_bytes < self._max_bytes:
                at_s, prompt = await self._waiting.get()
                line = await asyncio.to_thread(self._line, at_s, prompt)
                await file.write(line)
                num_bytes += len(line)

    def _line(self, at_s: float, prompt: Prompt) -> bytes:
        assert prompt.ids is not None
        tenant = f"{self._secret}:{prompt.extra_key or ''}"
        row = {
            "timestamp": round(at_s * 1000),
            "input_length": len(prompt.ids),
            "output_length": prompt.max_new,
            "hash_ids": page_keys(prompt.ids, BLOCK_TOKENS, tenant, prompt.cache_salt),
        }
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"
