"""The JSON values of a text file, each with the place it begins at: an array's, or one a line.

    [ {...}, {...} ]        an array: its entries
    {...}\n{...}\n          JSONL: one value a line
    { "a":\n  1 }           values that span lines: one after another

Knows nothing of what the values mean. Invariant: every fault names file and line.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from protos.errors import ConfigError

_SPACE = " \t\r\n"


def read_entries(path: Path) -> Iterator[tuple[str, object]]:
    """(`NAME line N`, value) for every value of the file, in order.

    Raises ConfigError for unreadable files and for what is no JSON.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read as UTF-8 text") from error
    if not text.strip(_SPACE):
        return iter(())
    if _is_value(text.lstrip(_SPACE).split("\n", 1)[0]) and "\n" in text.strip(_SPACE):
        return _by_line(text, path.name)
    if text.lstrip(_SPACE).startswith("["):
        return _of_array(text, path.name)
    return _by_value(text, path.name)


def _is_value(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _by_line(text: str, name: str) -> Iterator[tuple[str, object]]:
    # Not splitlines: a JSON text may hold other line ends of Unicode as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip(_SPACE):
            where = f"{name} line {number}"
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where} is no JSON: {error.msg}") from error
            except RecursionError as error:
                raise ConfigError(f"{where} is nested too deeply") from error


def _by_value(text: str, name: str) -> Iterator[tuple[str, object]]:
    reader = _Reader(text, name)
    while reader.peek():
        yield reader.value()


def _of_array(text: str, name: str) -> Iterator[tuple[str, object]]:
    reader = _Reader(text, name)
    reader.take("[")
    if reader.peek() != "]":
        yield reader.value()
        while reader.peek() == ",":
            reader.take(",")
            yield reader.value()
    reader.take("]")
    if reader.peek():
        raise ConfigError(f"{reader.where} holds something after the array's end")


class _Reader:
    """A place in a JSON text; knows its line."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._place = 0
        self._line = 1
        self._decoder = json.JSONDecoder()

    @property
    def where(self) -> str:
        return f"{self._name} line {self._line}"

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        place = self._place
        while place < len(self._text) and self._text[place] in _SPACE:
            place += 1
        self._go_to(place)
        return self._text[place : place + 1]

    def take(self, character: str) -> None:
        """Go past `character`. Raises ConfigError when something else comes."""
        found = self.peek()
        if found != character:
            raise ConfigError(
                f"{self.where} is no JSON: expected {character!r}, found {found or 'the end'!r}"
            )
        self._go_to(self._place + 1)

    def value(self) -> tuple[str, object]:
        """The value that begins next, and where. Raises ConfigError when there is none."""
        self.peek()
        where = self.where
        try:
            value, end = self._decoder.raw_decode(self._text, self._place)
        except json.JSONDecodeError as error:
            place = f"{self._name} line {error.lineno}"
            raise ConfigError(f"{place} is no JSON: {error.msg}") from error
        except RecursionError as error:
            raise ConfigError(f"{where} is nested too deeply") from error
        self._go_to(end)
        return where, value

    def _go_to(self, place: int) -> None:
        self._line += self._text.count("\n", self._place, place)
        self._place = place
