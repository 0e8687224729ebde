"""KV handoff from prefill to decode instances over ZeroMQ. Knows no SGLang; see README.md."""

from __future__ import annotations
