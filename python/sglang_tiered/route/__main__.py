"""``python -m sglang_tiered.route``."""

from __future__ import annotations

import sys

from sglang_tiered.route.cli import main

if __name__ == "__main__":
    sys.exit(main())
