"""The flags of disaggregation: one sentence for what cannot work, before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.config import TieredConfig, TierMode, TransferConfig
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import MiB
from sglang_tiered.integration.launch.resolve import (
    added_arguments,
    resolve_transfer,
    warnings,
)
from sglang_tiered.wire.keys import make_keys


def resolve(**explicit: Any) -> TransferConfig | None:
    return resolve_transfer({"disaggregation_mode": "decode", **explicit})


def added(explicit: dict[str, Any], *, mode: TierMode = TierMode.HOST) -> dict[str, str | None]:
    config = TieredConfig(mode=mode, transfer=resolve_transfer(explicit))
    return added_arguments(explicit, config, on_cpu=False)


def test_zmq_is_the_default_and_decode_uses_tiers() -> None:
    assert resolve_transfer({}) is None
    assert added({}, mode=TierMode.OFF) == {}
    for role in ("prefill", "decode"):
        explicit = {"disaggregation_mode": role}
        assert resolve_transfer(explicit) == TransferConfig()
        flags = added(explicit)
        assert flags["--disaggregation-transfer-backend"] == "zmq"
        assert ("--disaggregation-decode-enable-radix-cache" in flags) == (role == "decode")
        stock = added(explicit, mode=TierMode.OFF)
        assert "--disaggregation-decode-enable-radix-cache" not in stock


def test_every_value_reaches_the_settings(tmp_path: Path) -> None:
    make_keys(tmp_path)
    config = resolve(
        transfer_keys=str(tmp_path),
        transfer_encrypt="all",
        transfer_same_host="off",
        transfer_window_bytes="8MiB",
        transfer_connections="3",
        transfer_codec="int8",
        transfer_peer_timeout="2.5",
    )
    keys = {"keys_directory": str(tmp_path), "encrypt_data": True}
    sizes = {"window_bytes": 8 * MiB, "num_connections": 3, "peer_timeout_s": 2.5}
    assert config == TransferConfig(same_host=False, codec="int8", **keys, **sizes)


@pytest.mark.parametrize(
    ("explicit", "sentence"),
    [
        ({"transfer_encrypt": "some"}, "--transfer-encrypt some is unknown"),
        ({"transfer_window_bytes": "0"}, "transfer-window-bytes 0 must be greater than zero"),
        ({"transfer_connections": "0"}, "--transfer-connections 0 is not a whole number from 1"),
        ({"transfer_connections": "17"}, "--transfer-connections 17 must be at most 16"),
        ({"transfer_codec": "gzip"}, "--transfer-codec gzip is unknown; choose one of none, int8"),
        ({"transfer_peer_timeout": "1"}, "transfer-peer-timeout 1 must be from 2"),
        ({"transfer_peer_timeout": "nan"}, "transfer-peer-timeout nan is not a time"),
        ({"transfer_encrypt": "all"}, "needs --transfer-keys"),
        ({"transfer_keys": "/nowhere"}, "--transfer-keys /nowhere has no decode.key_secret"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2 cannot run with the zmq"),
        ({"transfer_codec": "int8", "disaggregation_enable_kv_checksum": True}, "int8 rounds what"),
    ],
)
def test_what_cannot_work_is_one_sentence(explicit: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(**explicit)


def test_server_of_both_roles_needs_both_keys(tmp_path: Path) -> None:
    """Keys that are missing at the switch leave a server without a role."""
    switches = {"enable_pd_role_switch": True, "transfer_keys": str(tmp_path)}
    make_keys(tmp_path)
    for role in ("prefill", "decode"):
        explicit = {"disaggregation_mode": role, **switches}
        assert "--disaggregation-decode-enable-radix-cache" in added(explicit), "later"
    (tmp_path / "prefill.key_secret").unlink()
    with pytest.raises(ConfigError, match="has no prefill.key_secret"):
        resolve(**switches)


def test_who_may_decode_alone_is_noted() -> None:
    """Prefill needs no ``--transfer-allow``, until it decodes and fails all."""
    given = {"disaggregation_mode": "prefill", "enable_pd_role_switch": True, "host": "0.0.0.0"}

    def warned(**more: Any) -> list[str]:
        explicit = {**given, **more}
        config = TieredConfig(mode=TierMode.OFF, transfer=resolve_transfer(explicit))
        return [*warnings(explicit, config, on_cpu=False)]

    assert "--transfer-allow" in warned()[0]
    for more in ({"host": "::1"}, {"enable_pd_role_switch": False}, {"transfer_allow": "::/0"}):
        assert not warned(**more)
