"""The entry point of ``sglang-tiered store``."""

from __future__ import annotations

import sys

from sglang_tiered.tools.store.cli import main

if __name__ == "__main__":
    sys.exit(main())
