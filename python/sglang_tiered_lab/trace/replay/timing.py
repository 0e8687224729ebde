"""What things cost in modelled seconds: prefill, and moving pages between tiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One server. Rates are bytes per second; none of the figures below was measured by this
    program, and each can be given by a flag."""

    kv_bytes_per_token: int
    prefill_fixed_s: float  # per request
    prefill_token_s: float  # per new token
    prefill_pair_s: float  # per pair of a new token and one it attends to
    host_bytes_per_s: float  # host to device, layer by layer while prefill runs
    host_fixed_s: float
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float
    nvme_fixed_s: float  # per load
    load_share: float = 0.8  # of the device's time that loads get while stores run

    def prefill_s(self, new: int, before: int) -> float:
        """Of ``new`` tokens behind ``before`` others, alone on the device."""
        return (
            self.prefill_fixed_s
            + self.prefill_token_s * new
            + self.prefill_pair_s * new * (before + new / 2)
        )

    def host_load_s(self, num_bytes: int) -> float:
        return self.host_fixed_s + num_bytes / self.host_bytes_per_s if num_bytes else 0.0


PROFILES = {
    # Llama-3.1-8B in bfloat16: 32 layers, 8 KV heads of 128, hidden size 4096. 2 FLOP per parameter
    # and token (8.03e9 of them) and 4 * 4096 * 32 per pair, at half of the 989 TFLOP/s that
    # NVIDIA's data sheet gives an H100 SXM. PCIe 5.0 x16; four PCIe 4.0 drives as one.
    "8b-h100": Hardware(
        kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
        prefill_fixed_s=5e-3,
        prefill_token_s=3.25e-5,
        prefill_pair_s=1.06e-9,
        host_bytes_per_s=50e9,
        host_fixed_s=1e-4,
        nvme_read_bytes_per_s=24e9,
        nvme_write_bytes_per_s=12e9,
        nvme_fixed_s=5e-4,
    ),
    # The demo model (3 layers, 2 KV heads of 64, float32) on two cores: from measured figures,
    # 205 ms for a cold prompt of 1,500 tokens and 22 ms for one with 1,472 of them in host memory.
    "demo-cpu": Hardware(
        kv_bytes_per_token=2 * 3 * 2 * 64 * 4,
        prefill_fixed_s=1.85e-2,
        prefill_token_s=1.24e-4,
        prefill_pair_s=0.0,
        host_bytes_per_s=4e9,
        host_fixed_s=1e-4,
        nvme_read_bytes_per_s=1.1e9,
        nvme_write_bytes_per_s=1.0e9,
        nvme_fixed_s=1e-3,
    ),
}
