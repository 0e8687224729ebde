"""The shape of a model's layers as the kernel sees it, and the options of a call."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

_HEAD_DIMS = (64, 128)
_QUERY_DTYPES = (torch.float16, torch.bfloat16)
_KV_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
# A decode tile holds all query heads of a KV head as rows of one product.
_MAX_GROUP = 64


class Roles(enum.Enum):
    """Which tiles a call runs. Every choice except the last two writes every query of the plan."""

    PLANNED = "planned"  # FUSED where the plan's gate says so, else SERIAL
    FUSED = "fused"  # prefill and decode tiles in one launch; SERIAL where one of them is empty
    SERIAL = "serial"  # the same tiles, prefill first, then decode
    PREFILL = "prefill"  # only the queries of prefill rows are written
    DECODE = "decode"  # only the queries of decode rows are written


class Schedule(enum.Enum):
    """How a fused launch gives tiles to thread blocks."""

    TICKET = "ticket"  # a ticket per SM picks the role, so that both roles meet on every SM
    PERSISTENT = "persistent"  # as many blocks as fit; each keeps its role until no tile is left


@dataclass(frozen=True)
class PodShape:
    """The constants of an attention layer.

    page_size: token ``j`` of a row sits at ``slot % page_size == j % page_size`` and the tokens of
    a page at consecutive slots. A caller that cannot promise it passes 1; results are the same.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize


def supports(shape: PodShape, device: torch.device | str = "cuda") -> str | None:
    """None if ``pod_attention`` serves this shape on this device, else one sentence saying why
    not. A CPU device takes any head size and any floating dtype: it runs plain PyTorch. Without a
    GPU in the machine, ``cuda`` is answered for one that is recent enough."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return (
            "POD attention has kernels for NVIDIA GPUs and plain PyTorch for CPUs, but nothing for "
            f"this {'ROCm' if device.type == 'cuda' else device.type} device; "
            "use another attention backend"
        )
    if shape.head_dim not in _HEAD_DIMS:
        return (
            f"head_dim {shape.head_dim} is not supported by POD attention, which has 64 and 128; "
            "use another attention backend for this model"
        )
    if shape.q_dtype not in _QUERY_DTYPES:
        return (
            f"queries in {shape.q_dtype} are not supported by POD attention; "
            "run the model in float16 or bfloat16"
        )
    if shape.kv_dtype not in _KV_DTYPES:
        return (
            f"a KV cache in {shape.kv_dtype} is not supported by POD attention; "
            "use float16, bfloat16, float8_e4m3fn or float8_e5m2"
        )
    if shape.kv_dtype.itemsize == 2 and shape.kv_dtype != shape.q_dtype:
        return (
            f"queries in {shape.q_dtype} with a KV cache in {shape.kv_dtype} are not supported by "
            "POD attention; use one dtype for both, or an fp8 cache"
        )
    if shape.group > _MAX_GROUP:
        return (
            f"{shape.group} query heads per KV head are not supported by POD attention, whose "
            f"decode tile holds {_MAX_GROUP}; use another attention backend for this model"
        )
    needed = (8, 9) if shape.kv_dtype == torch.float8_e4m3fn else (8, 0)
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < needed:
        return (
            f"a KV cache in {shape.kv_dtype} needs compute capability {needed[0]}.{needed[1]} for "
            "POD attention, which this GPU lacks; use another attention backend"
        )
    return None
