"""Keeps one core busy: core_burner.py computes until it is ended.

Always the same work, on data that a core's own cache holds.
"""

from __future__ import annotations

import hashlib

BLOCK = bytes(range(256)) * 64


def main() -> None:
    digest = hashlib.blake2b()
    while True:
        digest.update(BLOCK)


if __name__ == "__main__":
    main()
