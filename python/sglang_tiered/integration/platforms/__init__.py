"""SGLang without ``sgl_kernel``: platforms for a CPU and for CUDA, and what takes its place."""

from __future__ import annotations
