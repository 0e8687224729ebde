"""Pins: named sets of pages that reclaim keeps."""
