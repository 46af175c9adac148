"""Makes untrusted text, such as names of models, requests and endpoints, safe for a terminal."""


def printable(text: str, kept: str = "") -> str:
    """`text` with "?" for each control character, except those in `kept`."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in kept else "?" for c in text)
