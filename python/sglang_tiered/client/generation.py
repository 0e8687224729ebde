"""``Answer``: one generated answer that survives the server which generates it.

A broken stream goes on where it broke: the prompt and the tokens that came are the next request's
prompt, with as many fewer tokens to generate. What of them a tier holds is loaded, so with
``--tier-checkpoint-tokens`` little is computed again. The clients send and read; nothing here does.
"""

from __future__ import annotations

import operator
import random
import time
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from sglang_tiered.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


PATH = "/generate"
RESUME_S = 60.0
SILENCE_S = 300.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 4.0
MAX_RESUMED = 16
"""An answer that kills its server would be carried from one to the next."""

_LEFT_TO_GENERATE = ("max_new_tokens", "min_new_tokens")
_OF_THE_WHOLE_ANSWER = (
    *("json_schema", "regex", "ebnf", "structural_tag"),
    *("stop", "stop_regex", "custom_params"),
)
"""Parameters that SGLang judges by all tokens of the answer, of which the next server has none."""
_PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}


class Generated(msgspec.Struct, frozen=True):
    """Tokens that followed those before. ``num_cached``: tokens before the first of this stream
    that no server computed for it. ``num_computed_again``: tokens that a server had computed, and
    another one computed after a break; of all breaks. ``is_exact``: whether an unbroken stream
    would have these tokens too, by the rules of sampling; forwards of other batches may round
    otherwise."""

    ids: tuple[int, ...]
    num_resumed: int
    num_cached: int
    num_computed_again: int
    is_exact: bool
    finish_reason: dict[str, Any] | None = None  # of the last


class BrokenStreamError(Exception):
    """A stream ended before its answer did, or did not begin; says how. ``wait_s``: what the server
    asks for."""

    def __init__(self, how: str, wait_s: float = 0.0) -> None:
        super().__init__(how)
        self.wait_s = wait_s


class Answer:
    """What was asked, and what came. Raises ``RequestError`` for what no server would take.
    ``is_seeded``: the servers draw by ``sampling_seed``; ``resume_s``: for how long after a break
    another stream may not have brought a token."""

    def __init__(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        is_seeded: bool,
        resume_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            self._prompt = [operator.index(token) for token in input_ids]
        except TypeError as error:
            raise RequestError("input_ids must be a sequence of token numbers") from error
        self._sampling = dict(sampling_params)
        most = self._sampling.get("max_new_tokens")
        if not isinstance(most, int) or most < 1:
            raise RequestError(f"max_new_tokens {most!r} is no number of tokens; say at least 1")
        if self._sampling.get("n", 1) != 1:
            raise RequestError(f"n {self._sampling['n']} is more than one answer; ask for each")
        self._is_seeded, self._resume_s, self._clock = is_seeded, resume_s, clock
        self._ids: list[int] = []
        self._num_resumed = self._num_computed_again = 0
        self._broke_at: float | None = None  # unless tokens came since
        self._pause_s = MIN_PAUSE_S
        self.wait_s = 0.0
        """How long to wait before the next stream is asked for."""
        self.has_ended = False
        self._begin()

    @property
    def was_begun(self) -> bool:
        """Return whether any server was ever reached."""
        return bool(self._ids) or self._broke_at is not None

    def body(self) -> dict[str, Any]:
        """Return what to ask next, for all that is still missing."""
        self._begin()
        sampling = dict(self._sampling)
        for name in _LEFT_TO_GENERATE:
            if name in sampling:
                sampling[name] = max(0, sampling[name] - len(self._ids))
        ids = self._prompt + self._ids
        return {"input_ids": ids, "sampling_params": sampling, "stream": True}

    def _begin(self) -> None:
        """Of this stream: the tokens before it, those of them not computed, and what came of a line
        that has not ended."""
        self._num_before = len(self._ids)
        self._num_cached: int | None = None
        self._line = b""

    def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> NoReturn:
        """Raise ``BrokenStreamError`` for a status that another server, or a later moment, may
        answer otherwise, and ``RequestError`` for one that none will."""
        if status >= 500 or status == 429:
            wait = headers.get("retry-after", "")
            wait_s = min(float(wait), self._resume_s) if wait.isdecimal() else 0.0
            raise BrokenStreamError(f"it answered {status}", wait_s)
        text = body.decode(errors="replace")
        raise RequestError(f"{PATH} answered {status}: {text}", status)

    def read(self, data: bytes) -> Iterator[Generated]:
        """Yield what bytes of the stream bring. Raises ``BrokenStreamError``, and ``RequestError``
        for what the server refuses."""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if self.has_ended:
                return
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                piece = self._take(line)
                if piece is not None:
                    yield piece

    def _take(self, line: bytes) -> Generated | None:
        try:
            chunk = msgspec.json.decode(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise _refusal(chunk["error"])
            told, ids = chunk["meta_info"], chunk["output_ids"]
            reason, num_cached = told["finish_reason"], told.get("cached_tokens", 0)
            # Of all tokens of the stream, or with --incremental-streaming-output of the new ones.
            num_new = self._num_before + told["completion_tokens"] - len(self._ids)
            fresh = tuple(ids[-num_new:]) if num_new > 0 else ()
            if len(fresh) != max(0, num_new):
                raise ValueError("tokens are missing")
        except (KeyError, TypeError, ValueError) as error:
            shown = line.decode(errors="replace")
            raise RequestError(f"{PATH} answered what this client cannot read: {shown}") from error
        if reason is not None and reason["type"] == "abort":
            status, message = reason.get("status_code"), str(reason.get("message"))
            if status is None or status < 500:  # by an operator, or the client itself
                raise RequestError(f"the answer was aborted: {message}", status)
            raise BrokenStreamError(message)
        if self._num_cached is None:
            self._num_cached = num_cached
            if self._ids:
                self._num_resumed += 1
                # The KV of the last token was never computed.
                again = len(self._prompt) + len(self._ids) - 1 - num_cached
                self._num_computed_again += max(0, again)
        self._ids += fresh
        if fresh:
            self._broke_at, self._pause_s = None, MIN_PAUSE_S
        elif reason is None:
            return None
        self.has_ended = reason is not None
        return Generated(
            fresh,
            self._num_resumed,
            self._num_cached,
            self._num_computed_again,
            self._num_resumed == 0 or self._is_exact,
            reason,
        )

    def resume(self, error: Exception, why: str) -> None:
        """Note that a stream broke, and go on with another. Raises ``RequestError`` where none may
        be."""
        whole = [name for name in _OF_THE_WHOLE_ANSWER if self._sampling.get(name)]
        broke = f"the answer broke after {len(self._ids)} tokens ({why})"
        if self._ids and whole:
            raise RequestError(
                f"{broke}, and no other server can go on with it, as {whole[0]} is judged by all "
                "of its tokens; ask again"
            ) from error
        if self._num_resumed >= MAX_RESUMED:
            raise RequestError(
                f"{broke}, the {MAX_RESUMED + 1}th time; look into the logs of the servers"
            ) from error
        now = self._clock()
        self._broke_at = now if self._broke_at is None else self._broke_at
        if now - self._broke_at > self._resume_s:
            raise RequestError(
                f"{broke}, and nothing came for {self._resume_s:g} s; ask again when a server is "
                "there, or for longer with resume_s"
            ) from error
        wait_s = max(self._pause_s, getattr(error, "wait_s", 0.0))
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self.wait_s = wait_s * random.uniform(0.8, 1.2)  # or all that broke come together

    @property
    def _is_exact(self) -> bool:
        """Return whether the next token follows from those before, by the parameters."""
        sampling = self._sampling
        if any(sampling.get(name, neutral) != neutral for name, neutral in _PENALTIES.items()):
            return False  # which count the answer's tokens, not the prompt's
        if sampling.get("temperature") == 0 or sampling.get("top_k") == 1:
            return True
        return self._is_seeded and sampling.get("sampling_seed") is not None


def _refusal(error: Any) -> Exception:
    if isinstance(error, dict):
        status, message = error.get("code"), str(error.get("message"))
        if isinstance(status, int) and status >= 500:
            return BrokenStreamError(message)
        return RequestError(message, status if isinstance(status, int) else None)
    return RequestError(str(error))
