"""A message cut into DATA frames, and one that is larger than every window."""

from tests.workers.transport.helpers import DATA, frame

BIG = bytes(range(256)) * 1600  # 409,600 bytes


def data_frames(data: bytes, number: int = 1, size: int = 16384, end: bool = False) -> bytes:
    cuts = range(0, len(data), size)
    return b"".join(frame(DATA, 1 if end and at + size >= len(data) else 0, number, data[at : at + size]) for at in cuts)
