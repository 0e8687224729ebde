"""Mixed batches to measure, and the least time each can take."""

from __future__ import annotations

from dataclasses import dataclass

K = 1024


@dataclass(frozen=True)
class Heads:
    """An attention layer: Llama-3-8B's by default."""

    queries: int = 32
    kv: int = 8
    dim: int = 128


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches in this run: products per second of a matrix product, bytes per
    second of a copy (read and written)."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Mix:
    """One prompt's chunk of ``chunk`` new tokens at the end of ``length``, and ``decodes`` rows of
    one new token at the end of ``decode_length``. ``prompts`` of such chunks."""

    chunk: int
    length: int
    decodes: int
    decode_length: int
    prompts: int = 1

    @property
    def name(self) -> str:
        def short(tokens: int) -> str:
            return f"{tokens // K}k" if tokens % K == 0 else str(tokens)

        prompts = f"{self.prompts}x" if self.prompts > 1 else ""
        return (
            f"{prompts}{self.chunk} of {short(self.length)} + "
            f"{self.decodes} x {short(self.decode_length)}"
        )

    @property
    def extend_lens(self) -> list[int]:
        return [self.chunk] * self.prompts + [1] * self.decodes

    @property
    def prefix_lens(self) -> list[int]:
        prompt = [self.length - self.chunk] * self.prompts
        return prompt + [self.decode_length - 1] * self.decodes

    def prefill_flops(self, heads: Heads) -> float:
        """Of the visible scores and their values, two operations each."""
        visible = self.chunk * (self.length - self.chunk) + self.chunk * (self.chunk + 1) // 2
        return 4.0 * heads.queries * heads.dim * visible * self.prompts

    def decode_flops(self, heads: Heads) -> float:
        return 4.0 * heads.queries * heads.dim * self.decodes * self.decode_length

    def bytes(self, heads: Heads, itemsize: int = 2) -> float:
        """Each row's keys and values once, queries and results once."""
        kv_tokens = self.prompts * self.length + self.decodes * self.decode_length
        tokens = sum(self.extend_lens)
        return float(itemsize * heads.dim * 2 * (heads.kv * kv_tokens + heads.queries * tokens))

    def least_s(self, heads: Heads, ceilings: Ceilings) -> float:
        """The roofline: all products at the matrix product's rate or all bytes at the copy's,
        whichever takes longer, as if the other were hidden entirely."""
        flops = self.prefill_flops(heads) + self.decode_flops(heads)
        return max(flops / ceilings.flops, self.bytes(heads) / ceilings.bytes)


MIXES = (
    Mix(512, 4 * K, 32, 4 * K),
    Mix(512, 8 * K, 64, 8 * K),
    Mix(512, 16 * K, 64, 16 * K),
    Mix(1024, 8 * K, 64, 8 * K),
    Mix(2048, 4 * K, 64, 4 * K),
    Mix(2048, 8 * K, 64, 8 * K),
    Mix(2048, 16 * K, 128, 16 * K),
    Mix(4096, 16 * K, 128, 16 * K),
    Mix(8192, 8 * K, 128, 8 * K),
    Mix(8192, 16 * K, 128, 8 * K),
    Mix(8192, 16 * K, 256, 8 * K),
)
QUICK_MIXES = (MIXES[0], MIXES[5], MIXES[8])
# Odd lengths that no tile or page divides; a wrong key shows in rows this short.
GATE_MIXES = (
    Mix(61, 183, 3, 45),
    Mix(19, 19, 1, 130, prompts=2),
    Mix(33, 34, 5, 65),
)
