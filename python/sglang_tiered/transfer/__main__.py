"""The entry point of ``python -m sglang_tiered.transfer``."""

from __future__ import annotations

import sys

from sglang_tiered.transfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
