"""KV handoff from prefill to decode instances over ZeroMQ. Knows no SGLang; see README.md."""
