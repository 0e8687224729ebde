"""What ``manager`` relies on of SGLang's disaggregation, checked when a KV manager is made:
other servers never import it."""

from __future__ import annotations

__all__ = ["SIGNATURES"]

_COMMON = "sglang.srt.disaggregation.common.conn:CommonKV"
_QUEUE = "sglang.srt.disaggregation.decode:DecodePreallocQueue"

SIGNATURES: dict[str, tuple[str, ...]] = {
    f"{_COMMON}Manager.__init__": (
        *("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
    ),
    f"{_COMMON}Manager.register_to_bootstrap": ("self",),
    f"{_COMMON}Manager.try_ensure_parallel_info": ("self", "bootstrap_addr"),
    f"{_COMMON}Manager._resolve_rank_mapping": ("self", "info"),
    f"{_COMMON}Manager.update_status": ("self", "bootstrap_room", "status"),
    f"{_COMMON}Sender.send": ("self", "kv_indices", "state_indices"),
    f"{_COMMON}Sender.abort": ("self",),
    f"{_COMMON}Sender.clear": ("self",),
    f"{_COMMON}Sender.failure_exception": ("self",),
    f"{_COMMON}Receiver.init": ("self", "prefill_dp_rank"),
    f"{_COMMON}Receiver.send_metadata": (
        *("self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination"),
    ),
    f"{_COMMON}Receiver._get_bootstrap_info_from_server": (
        *("self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
    ),
    f"{_COMMON}Receiver.query_prefill_dp_ranks": ("bootstrap_addr", "bootstrap_rooms"),
    f"{_COMMON}Receiver._register_kv_args": ("self",),
    f"{_COMMON}Receiver._send_abort_notification": ("self", "force_arm"),
    f"{_COMMON}Receiver._clear": ("self",),
    f"{_COMMON}Receiver.failure_exception": ("self",),
    f"{_COMMON}Receiver.abort": ("self",),
    "sglang.srt.arg_groups.model_override_base:model_config_of": ("server_args",),
    f"{_QUEUE}._ensure_prefill_info": ("self", "addr_to_reqs"),
}
