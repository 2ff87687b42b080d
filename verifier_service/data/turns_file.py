"""The file of synthesised turns: JSONL with `q`, each line naming its candidate and its run.

    {"q": "...", "src": "synthesised", "candidate": 17, "run": "8f0c..."}

Candidates are offered in order; the file decides which are taken, so that it is the same however
they were made. It is a prompt file too. Invariants: no two turns say nearly the same (equal first
words, case and punctuation aside); a torn last line is dropped, never a whole one.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protos.errors import ConfigError
from verifier_service.data.skips import Skips

_MAX_TRIES_PER_TURN: Final = 200
_LINE_HEAD: Final = b'{"q": "'


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Which candidates are taken.

    min_words: of a turn. num_distinct_words: turns that share that many first words are the same.
    """

    min_words: int = 3
    num_distinct_words: int = 8

    def __post_init__(self) -> None:
        if self.min_words < 1 or self.num_distinct_words < 1:
            raise ConfigError("a turn has at least one word, and one that tells it apart")

    def key(self, text: str) -> str:
        """Equal for turns that say nearly the same."""
        letters = "".join(c if c.isalnum() else " " for c in text.casefold())
        return " ".join(letters.split()[: self.num_distinct_words])


class TurnsFile:
    """The turns of one run; resumes by reading what is there."""

    def __init__(self, path: Path, run_id: str, rules: TurnRules) -> None:
        """Raises ConfigError when the file holds something else, or turns of other settings."""
        self._path = path
        self._run_id = run_id
        self._rules = rules
        self._seen: set[str] = set()
        self._tries = 0
        self.following = 0
        self.skips = Skips()
        self._read()

    def __len__(self) -> int:
        return len(self._seen)

    def offer(self, index: int, text: str, is_ended: bool) -> bool:
        """Take candidate `index`, the next one, or refuse it; true when it was taken.

        is_ended: the target ended the turn by itself. Raises ConfigError when too many candidates
        in a row were unusable.
        """
        assert index >= self.following
        text = text.strip()
        key = self._rules.key(text)
        refusal = ""
        if not is_ended:
            refusal = "not ended"
        elif len(text.split()) < self._rules.min_words or not key:
            refusal = "too short"
        elif key in self._seen:
            refusal = "like one before"
        self.following = index + 1
        if refusal:
            self._refuse(refusal, index)
            return False
        self._seen.add(key)
        self._tries = 0
        line = {"q": text, "src": "synthesised", "candidate": index, "run": self._run_id}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        return True

    def _refuse(self, reason: str, index: int) -> None:
        self.skips.add(reason, f"candidate {index}")
        self._tries += 1
        if self._tries >= _MAX_TRIES_PER_TURN:
            counts = ", ".join(f"{n} {why}" for why, n in self.skips.counts.items())
            raise ConfigError(
                f"{self._tries} candidates in a row were unusable ({counts} in all): is this a "
                "chat model, and are there enough seed words?"
            )

    def _read(self) -> None:
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            return
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        # Not splitlines: a JSON text may hold other line ends of Unicode as they are.
        for line in whole.split(b"\n")[:-1]:
            self._take_line(line)
        torn = data[len(whole) :]
        if not (torn.startswith(_LINE_HEAD) or _LINE_HEAD.startswith(torn)):
            raise ConfigError(f"{self._path.name} exists and holds no synthesised turns")
        if torn:
            with self._path.open("r+b") as stream:
                stream.truncate(len(whole))

    def _take_line(self, line: bytes) -> None:
        name = self._path.name
        try:
            entry = json.loads(line)
            text, index, run_id = str(entry["q"]), int(entry["candidate"]), entry.get("run")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name} exists and holds no synthesised turns") from error
        if run_id != self._run_id:
            raise ConfigError(
                f"{name} was begun with other settings; resume with the same ones or choose "
                "another file"
            )
        self._seen.add(self._rules.key(text))
        self.following = index + 1
