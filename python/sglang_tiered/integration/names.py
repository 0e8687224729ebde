"""Names by which SGLang's flags choose what this package registers."""

from __future__ import annotations

__all__ = ["CACHE_BACKEND", "TRANSFER_BACKEND"]

CACHE_BACKEND = "tiered"  # --radix-cache-backend
TRANSFER_BACKEND = "zmq"  # --disaggregation-transfer-backend
