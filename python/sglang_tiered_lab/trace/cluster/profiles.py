"""What servers are made of: published figures of accelerators and models, and what follows.

``hardware.json`` holds the figures, each with its source; ``load_profiles`` checks that none is
missing. ``Profiles.kind`` derives a server's seconds from them by the roofline rules of its
docstring. A file of one's own in the same form takes its place.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered_lab.trace.replay.timing import Hardware

# Bounded, so that no product or quotient of them overflows.
_Positive = Annotated[float, msgspec.Meta(ge=1e-9, le=1e18)]
_Source = Annotated[str, msgspec.Meta(min_length=1)]
_KIND = re.compile(r"(?:([1-9][0-9]?)x)?([a-z0-9.-]+)")


class _Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: _Positive
    source: _Source


class _Share(_Figure, frozen=True):
    value: Annotated[float, msgspec.Meta(ge=1e-9, le=1)]


class _Tokens(_Figure, frozen=True):
    value: Annotated[float, msgspec.Meta(ge=1, le=1e18)]


class _Price(_Figure, frozen=True):
    """Its source is where to look it up."""

    def __post_init__(self) -> None:
        if not self.source.startswith(("https://", "assumed")):
            raise ValueError("the source of a price is a URL, or says that it is assumed")


class _Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    flops: _Figure
    memory_bytes: _Figure
    memory_bytes_per_s: _Figure
    host_bytes: _Figure
    host_bytes_per_s: _Figure
    nvme_bytes: _Figure
    nvme_read_bytes_per_s: _Figure
    nvme_write_bytes_per_s: _Figure
    network_bytes_per_s: _Figure
    price_per_hour: _Price


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parameters: _Positive
    layers: Annotated[int, msgspec.Meta(ge=1)]
    kv_heads: Annotated[int, msgspec.Meta(ge=1)]
    head_dim: Annotated[int, msgspec.Meta(ge=1)]
    hidden: Annotated[int, msgspec.Meta(ge=1)]
    bytes: _Positive
    source: _Source


class _Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    compute: _Share
    memory: _Share
    transfer: _Share
    parallel: _Share
    loads: _Share
    kv: _Share


class _Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill_s: _Figure
    host_s: _Figure
    nvme_s: _Figure
    peer_s: _Figure
    bucket_s: _Figure
    bucket_bytes_per_s: _Figure
    chunk_tokens: _Tokens


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of server. A decode step takes ``step_s[0]``, ``step_s[1]`` for each request and
    ``step_s[2]`` for each token attended to. A peer's page comes from its drive, over the
    network: ``peer`` and ``bucket`` are seconds per load and per byte. ``mixes``: whether a step
    carries decodes beside a prefill's chunk. ``outside_s`` passes for every request outside of
    the server's queues (HTTP, tokens)."""

    name: str
    hardware: Hardware
    step_s: tuple[float, float, float]
    kv_tokens: int
    host_tokens: int
    nvme_tokens: int
    network_bytes_per_s: float
    peer: tuple[float, float]
    bucket: tuple[float, float]
    price_per_hour: float
    chunk_tokens: int
    page_tokens: int = 64
    mixes: bool = True
    outside_s: float = 0.0


class Profiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file of profiles."""

    accelerators: dict[str, _Accelerator]
    models: dict[str, _Model]
    shares: _Shares
    fixed: _Fixed

    def kind(self, name: str, model: str) -> Kind:
        """Return the kind of server ``h100``, or ``4xh100`` for four that share a model.

        Prefill takes 2 operations per parameter and token, and ``4 * hidden * layers`` per pair
        of tokens. A decode step reads the weights, and the keys and values of its tokens, and
        computes 2 operations per parameter and request. What the weights leave of the memory,
        times the share ``kv``, holds keys and values. Raises ``ConfigError``.
        """
        match = _KIND.fullmatch(name)
        if match is None or match[2] not in self.accelerators:
            known = ", ".join(self.accelerators)
            raise ConfigError(
                f"{name!r} is no hardware; write one of {known}, or 4xh100 for four that share a "
                "model."
            )
        if model not in self.models:
            raise ConfigError(f"--model {model} is unknown; choose from {', '.join(self.models)}.")
        number, one, of = int(match[1] or 1), self.accelerators[match[2]], self.models[model]
        shares, fixed = self.shares, self.fixed
        whole = number if number == 1 else number * shares.parallel.value
        flops = one.flops.value * whole * shares.compute.value
        memory_rate = one.memory_bytes_per_s.value * whole * shares.memory.value
        weight_bytes = of.parameters * of.bytes
        token_bytes = int(2 * of.layers * of.kv_heads * of.head_dim * of.bytes)
        if not token_bytes:
            raise ConfigError(
                f"--model {model} has less than a byte of keys and values for a token; correct its "
                "figures in --profiles."
            )
        room = (one.memory_bytes.value * number - weight_bytes) * shares.kv.value
        if room < token_bytes * fixed.chunk_tokens.value:
            raise ConfigError(
                f"{name} has {one.memory_bytes.value * number / 1e9:,.0f} GB of memory, too little "
                f"for {model} ({weight_bytes / 1e9:,.0f} GB) and its keys and values; take more "
                "accelerators."
            )
        transfer = shares.transfer.value * number
        read_rate = one.nvme_read_bytes_per_s.value * transfer
        network_rate = one.network_bytes_per_s.value * transfer
        hardware = Hardware(
            kv_bytes_per_token=token_bytes,
            prefill_fixed_s=fixed.prefill_s.value,
            prefill_token_s=2 * of.parameters / flops,
            prefill_pair_s=4 * of.hidden * of.layers / flops,
            host_bytes_per_s=one.host_bytes_per_s.value * transfer,
            host_fixed_s=fixed.host_s.value,
            nvme_read_bytes_per_s=read_rate,
            nvme_write_bytes_per_s=one.nvme_write_bytes_per_s.value * transfer,
            nvme_fixed_s=fixed.nvme_s.value,
            load_share=shares.loads.value,
        )
        return Kind(
            name=name,
            hardware=hardware,
            step_s=(
                weight_bytes / memory_rate,
                2 * of.parameters / flops,
                token_bytes / memory_rate,
            ),
            kv_tokens=int(room / token_bytes),
            host_tokens=int(one.host_bytes.value * number / token_bytes),
            nvme_tokens=int(one.nvme_bytes.value * number / token_bytes),
            network_bytes_per_s=network_rate,
            peer=(fixed.peer_s.value, 1 / min(network_rate, read_rate)),
            bucket=(fixed.bucket_s.value, 1 / fixed.bucket_bytes_per_s.value),
            price_per_hour=one.price_per_hour.value * number,
            chunk_tokens=int(fixed.chunk_tokens.value),
        )


@functools.cache
def load_profiles(path: Path | None = None) -> Profiles:
    """Read profiles, those of this package without a path. Raises ``ConfigError`` for a gap."""
    file = Path(__file__).with_name("hardware.json") if path is None else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=Profiles)
    except OSError as error:
        raise ConfigError(
            f"--profiles {file} cannot be read ({error.strerror}); name a file like hardware.json."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--profiles {file} has a gap ({error}); every figure needs a positive value, a "
            "share one up to 1, and its source."
        ) from error
