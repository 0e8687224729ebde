"""SGLang on CUDA without ``sgl_kernel``: native and Triton kernels only, host copies in PyTorch."""

from __future__ import annotations
