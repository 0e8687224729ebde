"""The entry point of ``sglang-tiered trace``."""

from __future__ import annotations

import sys

from sglang_tiered_lab.trace.cli import main

if __name__ == "__main__":
    sys.exit(main())
