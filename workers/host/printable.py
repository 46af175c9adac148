"""Makes untrusted text, such as names of models, requests and endpoints, safe for a terminal."""


def printable(text: str) -> str:
    r"""Returns `text` with an escape for each character that a terminal would hide or take as a command, such as `\n`, `\u001b` and
    `\u202e`.

    These are all control and format characters (bidirectional overrides, zero-width joiners), line and paragraph separators, unusual
    spaces, and code points without a character. The escapes are those of JSON: in JSON text, they change no value.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable_lines(text: str) -> str:
    r"""Returns a text of several lines with escapes as in `printable`. Only its line feeds stay."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    if (short := _SHORT.get(character)) is not None:
        return short
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
