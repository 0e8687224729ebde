"""What prefill, decode and servers that share pages speak: sockets, keys, frames."""

from __future__ import annotations
