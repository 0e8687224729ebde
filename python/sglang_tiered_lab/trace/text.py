"""From text to tokens and blocks: an estimate from bytes, or a given tokenizer.

A prompt is a string of bytes with a fixed number of bytes to a token. The estimate takes the text's
UTF-8 as it is, ``BYTES_PER_TOKEN`` to a token; a tokenizer writes each token as four bytes. Blocks
are cut from that string, and a block's id is a digest of all bytes up to its end: equal ids are
equal prefixes, so shared system prompts are found by content. (Digests of 63 bits: among ten
million different blocks the chance of one collision is about 1 in 180,000.)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


BYTES_PER_TOKEN = 4
"""About what English text has under the tokenizers of current models; an estimate."""

_ID_BITS = 63
_TOKEN_BYTES = 4


class Tokens(msgspec.Struct, frozen=True):
    """How text becomes the bytes of a prompt. ``encode=None`` is UTF-8."""

    block_tokens: int
    bytes_per_token: int = BYTES_PER_TOKEN
    encode: Callable[[str], bytes] | None = None

    def to_bytes(self, text: str) -> bytes:
        if self.encode is not None:
            return self.encode(text)
        return text.encode("utf-8", "surrogatepass")  # a lone surrogate is three bytes


def load_tokenizer(path: Path, block_tokens: int) -> Tokens:
    """``Tokens`` that count with a Hugging Face ``tokenizer.json``. Raises ``ConfigError``."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "--tokenizer needs the package tokenizers; install it, or count by bytes."
        ) from error
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ConfigError(
            f"{file} is not a tokenizer ({error}); name a tokenizer.json or a model's folder."
        ) from error
    return Tokens(block_tokens, _TOKEN_BYTES, functools.partial(_encode, tokenizer))


def _encode(tokenizer: object, text: str) -> bytes:
    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates become "?"
    encoding = tokenizer.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
    return np.asarray(encoding.ids, dtype="<u4").tobytes()


class PromptChain:
    """A prompt that grows, with the ids of its blocks. Hashes every byte once or, in the block
    that is being filled, once for every look."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._block_bytes = tokens.block_tokens * tokens.bytes_per_token
        self._ids: list[int] = []  # of full blocks
        self._digest = b""  # of the last full block and all before it
        self._tail = b""
        self._num_bytes = 0

    def append(self, text: str) -> None:
        data = self._tokens.to_bytes(text)
        self._num_bytes += len(data)
        data = self._tail + data
        full = len(data) - len(data) % self._block_bytes
        for start in range(0, full, self._block_bytes):
            self._digest = self._next(data[start : start + self._block_bytes])
            self._ids.append(_id(self._digest))
        self._tail = data[full:]

    @property
    def num_tokens(self) -> int:
        return -(-self._num_bytes // self._tokens.bytes_per_token)

    def block_ids(self) -> tuple[int, ...]:
        """Of every block, the last one filled in part."""
        if not self._tail:
            return tuple(self._ids)
        return (*self._ids, _id(self._next(self._tail)))

    def _next(self, block: bytes) -> bytes:
        return xxhash.xxh3_128_digest(self._digest + block)


def _id(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> (64 - _ID_BITS)
