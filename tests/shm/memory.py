"""Regions for tests that need no named segment."""

from typing import Any

from shm.segment import Region


def region_for(schema: Any) -> Region:
    return Region(memoryview(bytearray(schema.bytes)))
