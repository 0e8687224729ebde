"""Checks the flags of disaggregation, and adds what SGLang needs besides.

SGLang's transfer backends need RDMA in practice and ``mooncake`` is its default; here ``zmq`` is,
because it runs anywhere.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

from sglang_tiered.codecs import LOSSY_CODEC_NAMES
from sglang_tiered.config import TransferConfig
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import flags_of, refuse_given, values_of
from sglang_tiered.integration.names import TRANSFER_BACKEND
from sglang_tiered.transfer.addresses import parse_networks
from sglang_tiered.wire.keys import load_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["isolation", "resolve_transfer", "transfer_arguments"]

ROLES = ("prefill", "decode")


def resolve_transfer(explicit: Mapping[str, Any]) -> TransferConfig | None:
    """Return the transfer settings of a prefill or decode instance; None for any other server.
    Raises ``ConfigError``; the keys are read, nothing is written."""
    role = explicit.get("disaggregation_mode")
    backend = explicit.get("disaggregation_transfer_backend", TRANSFER_BACKEND)
    if role not in ROLES or backend != TRANSFER_BACKEND:
        refuse_given(
            explicit,
            flags_of(TransferConfig),
            "is for --disaggregation-mode prefill or decode with "
            f"--disaggregation-transfer-backend {TRANSFER_BACKEND}; drop it, or add those",
        )
        return None
    workers = explicit.get("tokenizer_worker_num") or 1
    if workers > 1:
        raise ConfigError(
            f"--tokenizer-worker-num {workers} cannot run with the {TRANSFER_BACKEND} transfer "
            "backend, because SGLang's tokenizer workers load no plugins; drop it."
        )
    values = values_of(TransferConfig, explicit)
    if "allowed_networks" in values:
        values["allowed_networks"] = parse_networks("--transfer-allow", values["allowed_networks"])
    config = TransferConfig(**values)
    if config.encrypt_data and config.keys_directory is None:
        raise ConfigError(
            "--transfer-encrypt all needs --transfer-keys; make keys with sglang-tiered keygen."
        )
    sums = "disaggregation_enable_kv_checksum"
    if config.codec in LOSSY_CODEC_NAMES and explicit.get(sums):
        raise ConfigError(
            f"--transfer-codec {config.codec} rounds what --disaggregation-enable-kv-checksum sums "
            "before and after; drop one of them."
        )
    if config.keys_path is not None:
        for needed in ROLES if explicit.get("enable_pd_role_switch") else (role,):
            load_keys(config.keys_path, needed)
    return config


def isolation(explicit: Mapping[str, Any], config: TransferConfig | None) -> str | None:
    """Return a sentence for the operator of a server that may come to decode, and would take no KV
    from the machines that reach it."""
    if config is None or config.keys_path is not None or config.allowed_networks:
        return None
    host = explicit.get("host") or "127.0.0.1"
    if not explicit.get("enable_pd_role_switch") or _is_loopback(host):
        return None
    return (
        "with --enable-pd-role-switch this server may come to decode, and then fails all requests "
        "whose prefill is on another machine; name those in --transfer-allow, or pass "
        "--transfer-keys."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def transfer_arguments(
    explicit: Mapping[str, Any], config: TransferConfig | None, *, has_tiers: bool
) -> dict[str, str | None]:
    """Return the flags that SGLang needs besides. On decode, or what may become it, the use of its
    tiers is among them, so that prefill sends only what they do not hold."""
    if config is None:
        return {}
    added: dict[str, str | None] = {"--disaggregation-transfer-backend": TRANSFER_BACKEND}
    may_decode = explicit["disaggregation_mode"] == "decode" or explicit.get(
        "enable_pd_role_switch"
    )
    if has_tiers and may_decode:
        added["--disaggregation-decode-enable-radix-cache"] = None
    return added
