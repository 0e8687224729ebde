"""Write a small random model: make_demo_model.py OUT_DIR [--seed 0] [--shape 8m|24m|...]."""

from __future__ import annotations

import sys

from sglang_tiered.demo.model import main

if __name__ == "__main__":
    sys.exit(main())
