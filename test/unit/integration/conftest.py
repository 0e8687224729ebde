"""Prepares SGLang as a server process does, before any test module imports it."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about kernels a CPU does not have
    import sglang.srt.server_args  # noqa: F401 - its import warns too
    from sglang.srt.plugins import load_plugins

    load_plugins()
