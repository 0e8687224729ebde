"""A process whose disk refuses what would make a file larger than some bytes: writes a line per
order, and says how many were lost; ``grow`` ends the refusal. Run by ``test_writer``."""

from __future__ import annotations

import logging
import resource
import sys
import threading
from pathlib import Path

from kit.ended_request import ended
from sglang_tiered.integration.observe.requests.writer import LineWriter


def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    path, limit = Path(sys.argv[1]), int(sys.argv[2])
    if limit:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    writer = LineWriter(path, max_bytes=1 << 30)
    written = threading.Event()
    add = writer._add

    def add_and_tell(lines: list[bytes]) -> None:
        add(lines)
        written.set()

    writer._add = add_and_tell  # type: ignore[method-assign]
    for order in sys.stdin:
        if order.strip() == "grow":
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            continue
        written.clear()
        writer.put(*ended(order.strip()))
        assert written.wait(60)
        print(f"dropped {writer.num_dropped}", flush=True)


if __name__ == "__main__":
    main()
