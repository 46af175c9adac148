"""Writes changed values into the text of a configuration and leaves everything else as it is: comments, order, quotes, line breaks.

`rewritten` compares the values in a text with new ones. It replaces changed scalars in place, adds new fields after the last one, and
deletes the lines of removed fields. It changes items of lists in the same way. If that is impossible (flow style, anchors), it writes the
smallest part around the change anew, without the comments in this part.
"""

from typing import Any, Final

from epp.config import yaml_nodes

Removed: Final = type("Removed", (), {})()  # marks an item of a list of new values that is to be removed


class _Whole(Exception):
    """Stops the editing: the whole document has to be written anew."""


def rewritten(text: str, document: Any) -> str:
    """Returns the text, changed to have the values of `document`, whose lists may contain `Removed`. The text must be readable YAML."""
    root = yaml_nodes.composed(text)
    if root is None or root.id != "mapping" or root.flow_style:
        return _anew(document)
    editor = _Editor(text)
    try:
        editor.value(root, document)
    except _Whole:
        return _anew(document)
    result = editor.result()
    again = yaml_nodes.plain(result)
    return result if again == _clean(document) else _anew(document)


def _anew(document: Any) -> str:
    return yaml_nodes.dump(_clean(document))


def _clean(value: Any) -> Any:
    """Returns the value without the list items that are `Removed`, at any depth."""
    if isinstance(value, dict):
        return {key: _clean(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_clean(child) for child in value if child is not Removed]
    return value


class _Editor:
    def __init__(self, text: str) -> None:
        self._text = text
        self._edits: list[tuple[int, int, str]] = []

    def result(self) -> str:
        text = self._text
        for start, end, new in sorted(self._edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def value(self, node: Any, new: Any) -> None:
        """Compares one value of the text (`node`) with its new value, and notes the replacements."""
        if yaml_nodes.plain_node(node) == new:
            return
        block = node.id != "scalar" and not node.flow_style and node.value
        if block and isinstance(new, dict) and node.id == "mapping":
            self._mapping(node, new)
        elif block and isinstance(new, list) and node.id == "sequence" and len(new) >= len(node.value):
            self._sequence(node, new)
        elif node.id == "scalar" or node.flow_style:
            self._edits.append((node.start_mark.index, self._end(node), _flow(new)))
        else:
            raise _Whole

    def _sequence(self, node: Any, new: list[Any]) -> None:
        """Changes and removes items. Adds the further items of `new` behind the last item that stays."""
        last = None
        for item, child in zip(node.value, new, strict=False):
            if child is Removed:
                self._cut(self._dash(item), self._end(item))
            else:
                self.value(item, child)
                last = item
        added = new[len(node.value) :]
        if not added:
            return
        if last is None:
            raise _Whole
        column = self._dash(last) - self._text.rfind("\n", 0, self._dash(last)) - 1
        lines = "".join(f"\n{' ' * column}- {_item(child, column + 2)}" for child in added)
        stop = self._line_end(self._end(last))
        self._edits.append((stop, stop, lines))

    def _mapping(self, node: Any, new: dict[str, Any]) -> None:
        old = {key.value: (key, child) for key, child in node.value}
        added = {key: child for key, child in new.items() if key not in old}
        gone = [pair for name, pair in old.items() if name not in new]
        for name, (_, child) in old.items():
            if name in new:
                self.value(child, new[name])
        column = node.start_mark.column
        lines = _block(added, column) if added else ""
        front = [name for name in ("apiVersion", "kind") if name in added]
        if front and column == 0:
            self._edits.append((node.start_mark.index, node.start_mark.index, _block({n: new[n] for n in front}, 0) + "\n"))
            rest = {name: child for name, child in added.items() if name not in front}
            lines = _block(rest, 0) if rest else ""
        for key, child in gone:
            if lines:
                self._edits.append((key.start_mark.index, self._end(child), lines))
                lines = ""
            elif len(gone) == len(old):
                raise _Whole
            else:
                self._cut(key.start_mark.index, self._end(child))
        if lines:
            last = self._line_end(self._end(node))
            self._edits.append((last, last, "\n" + " " * column + lines))

    def _line_end(self, at: int) -> int:
        """Returns the end of the line on which a value ends, so that a comment behind the value stays behind it."""
        stop = self._text.find("\n", at)
        stop = len(self._text) if stop < 0 else stop
        if (rest := self._text[at:stop].strip()) and not rest.startswith("#"):
            raise _Whole
        return stop

    def _dash(self, item: Any) -> int:
        return self._text.rindex("-", 0, item.start_mark.index)

    def _cut(self, start: int, end: int) -> None:
        """Removes a part of the text with its lines. A comment behind the part gets a line of its own."""
        begin = self._text.rfind("\n", 0, start) + 1
        if self._text[begin:start].strip():
            raise _Whole
        stop = self._line_end(end)
        comment = self._text[end:stop].strip()
        after = stop if comment else min(stop + 1, len(self._text))
        self._edits.append((begin, after, self._text[begin:start] + comment if comment else ""))

    def _end(self, node: Any) -> int:
        """Returns where a value ends. PyYAML's end mark of a block collection lies after the blank lines and comments that follow it."""
        while node.id != "scalar" and not node.flow_style and node.value:
            last = node.value[-1]
            node = last[1] if isinstance(last, tuple) else last
        end: int = node.end_mark.index
        return len(self._text[:end].rstrip()) if node.id == "scalar" and node.style in ("|", ">") else end


def _block(fields: dict[str, Any], column: int) -> str:
    """Writes fields in block style. All lines but the first are indented by `column`."""
    return yaml_nodes.dump(_clean(fields)).rstrip("\n").replace("\n", "\n" + " " * column)


def _item(value: Any, column: int) -> str:
    """Writes an item of a list in block style, behind its `- `."""
    return _block(value, column) if isinstance(value, dict) and value else _flow(value)


def _flow(value: Any) -> str:
    return yaml_nodes.dump_flow(_clean(value))
