"""The entry point of ``sglang-tiered cluster``."""

from __future__ import annotations

import sys

from sglang_tiered_lab.cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
