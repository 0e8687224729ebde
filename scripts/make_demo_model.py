"""Write a small random model: make_demo_model.py OUT_DIR [--seed 0] [--shape 8m|24m|...]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_tiered.demo.model import SHAPES, write_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--shape", choices=SHAPES, default="8m", help="parameters, in millions; KiB of KV"
    )
    args = parser.parse_args()
    try:
        made = write_model(args.out_dir, args.seed, SHAPES[args.shape])
    except OSError as error:
        print(f"make_demo_model: {error}", file=sys.stderr)
        return 1
    print(f"{'made' if made else 'already there:'} {args.out_dir}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
