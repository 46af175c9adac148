"""Text for a terminal that others have a say in: names of models, requests and endpoints. Nothing in it steers the terminal."""


def printable(text: str, kept: str = "") -> str:
    """Without control characters but those of `kept`."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in kept else "?" for c in text)
