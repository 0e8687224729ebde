"""Runs commands that permissions stop, also where the tests are root's."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence

from kit.commands import ran

_PR_CAPBSET_DROP = 24
_CAPABILITIES = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root passes every check


def run_unprivileged(
    command: Sequence[str], *, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a command without root's right to open what the permissions of a file forbid."""
    libc = ctypes.CDLL(None, use_errno=True)

    def drop() -> None:
        for capability in _CAPABILITIES if os.geteuid() == 0 else ():
            if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "root keeps its capabilities")

    return ran(*command, preexec_fn=drop, timeout_s=timeout_s)
