"""The flags of disaggregation: what they come to, and what cannot work with them.

SGLang's transfer backends need RDMA in practice and ``mooncake`` is its default; here ``zmq`` is,
because it runs anywhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import TransferConfig, parse_bytes
from sglang_tiered.errors import ConfigError
from sglang_tiered.extras import require
from sglang_tiered.integration.launch.flags import TRANSFER_FLAGS
from sglang_tiered.integration.names import TRANSFER_BACKEND
from sglang_tiered.transfer.addresses import parse_networks
from sglang_tiered.transfer.wire_codec import CODECS
from sglang_tiered.wire.keys import load_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["resolve_transfer", "transfer_arguments"]

ROLES = ("prefill", "decode")


def resolve_transfer(explicit: Mapping[str, Any]) -> TransferConfig | None:
    """The transfer settings of a prefill or decode instance; None for any other server. Raises
    ``ConfigError``; the keys are read, nothing is written."""
    role = explicit.get("disaggregation_mode")
    backend = explicit.get("disaggregation_transfer_backend", TRANSFER_BACKEND)
    if role not in ROLES or backend != TRANSFER_BACKEND:
        for flag in TRANSFER_FLAGS:
            value = explicit.get(flag.lstrip("-").replace("-", "_"))
            if value is not None:
                raise ConfigError(
                    f"{flag} {value} is for --disaggregation-mode prefill or decode with "
                    f"--disaggregation-transfer-backend {TRANSFER_BACKEND}; drop it, or add those."
                )
        return None
    workers = explicit.get("tokenizer_worker_num") or 1
    if workers > 1:
        raise ConfigError(
            f"--tokenizer-worker-num {workers} cannot run with the {TRANSFER_BACKEND} transfer "
            "backend, because SGLang's tokenizer workers load no plugins; drop it."
        )
    keys = explicit.get("transfer_keys")
    directory = None if keys is None else str(Path(keys).expanduser().absolute())
    config = TransferConfig(
        keys_directory=directory,
        encrypt_data=_choice(explicit, "transfer_encrypt", ("control", "all")) == "all",
        same_host=_choice(explicit, "transfer_same_host", ("auto", "off")) != "off",
        window_bytes=_size(explicit),
        num_connections=_connections(explicit),
        codec=_choice(explicit, "transfer_codec", CODECS),
        peer_timeout_s=_number(explicit, "transfer_peer_timeout", 4.0),
        allowed_networks=_networks(explicit),
    )
    if config.codec == "zstd":
        require("--transfer-codec zstd", "zstandard")
    if directory is not None:
        load_keys(Path(directory), role)
    return config


def transfer_arguments(
    explicit: Mapping[str, Any], config: TransferConfig | None, *, has_tiers: bool
) -> dict[str, str | None]:
    """What SGLang is told besides: the backend, and on decode that its tiers are used, so that
    prefill sends only what they do not hold."""
    if config is None:
        return {}
    added: dict[str, str | None] = {"--disaggregation-transfer-backend": TRANSFER_BACKEND}
    if has_tiers and explicit["disaggregation_mode"] == "decode":
        added["--disaggregation-decode-enable-radix-cache"] = None
    return added


def _choice(explicit: Mapping[str, Any], name: str, values: tuple[str, ...]) -> str:
    value = explicit.get(name) or values[0]
    if value not in values:
        raise ConfigError(f"{_flag(name)} {value} is unknown; choose one of {', '.join(values)}.")
    return str(value)


def _number(explicit: Mapping[str, Any], name: str, default: float) -> float:
    text = explicit.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{_flag(name)} {text} is not a number.") from None


def _connections(explicit: Mapping[str, Any]) -> int:
    text = explicit.get("transfer_connections")
    if text is None:
        return TransferConfig().num_connections
    if not re.fullmatch(r"[+-]?\d+", text):
        raise ConfigError(f"--transfer-connections {text} is not a whole number.")
    return int(text)


def _networks(explicit: Mapping[str, Any]) -> tuple[str, ...]:
    text = explicit.get("transfer_allow")
    return () if text is None else parse_networks("--transfer-allow", text)


def _size(explicit: Mapping[str, Any]) -> int:
    text = explicit.get("transfer_window_bytes")
    if text is None:
        return TransferConfig().window_bytes
    return parse_bytes("--transfer-window-bytes", text, otherwise="drop it for the default")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
