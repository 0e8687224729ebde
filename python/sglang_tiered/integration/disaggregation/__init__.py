"""SGLang's KV manager over the ZeroMQ handoff."""

from __future__ import annotations
