"""The entry point of ``sglang-tiered explain``."""

from __future__ import annotations

import sys

from sglang_tiered.tools.explain.cli import main

if __name__ == "__main__":
    sys.exit(main())
