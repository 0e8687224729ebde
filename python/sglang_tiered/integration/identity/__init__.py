"""Whose bytes pages are: namespace, model, tenants."""

from __future__ import annotations
