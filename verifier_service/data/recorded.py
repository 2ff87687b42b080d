"""Texts and feature rows of a target, made once and kept: what drafters are replayed against.

Law 1: for (target, prompt, sampling values, seed, max_new) there is one text, whatever is drafted.
It is made here by plain decoding in the real engine, in large batches, and its rows are those that
lie beside the KV. The cache holds one file a text, under a folder for the settings: more prompts,
more layers or a broken run only add what is missing. Knows no drafter.

A text that ends by itself is continued for NUM_BEYOND tokens, see there. The cache does not depend
on the numerics fingerprint: texts of another machine are as good to replay against.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from protos.errors import ConfigError, OutriderError
from protos.features import DType
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.params import SamplingParams
from protos.recorded import NUM_BEYOND, RecordedText
from verifier_service.data.recorded_file import TextFacts, read_text, recorded_text, write_text
from verifier_service.data.recording_engine import Recording
from verifier_service.engine.loop import Engine

_VERSION: Final = 1

Report = Callable[[int, int, int], None]
"""Called with texts made, texts to make, and tokens made."""

MakeEngine = Callable[[Sequence[int], int], Recording]
"""Makes an engine that keeps rows of these layers, for requests of at most so many tokens."""


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """What decides a text, besides its prompt. dtype: of weights, KV and rows."""

    target_digest: str
    dtype: DType
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new: int = 128

    def params(self, prompt_ids: Sequence[int]) -> SamplingParams:
        """Sampling of one prompt; its seed depends on the run's seed and the prompt alone."""
        text = f"{self.seed}:{','.join(map(str, prompt_ids))}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed,
            max_tokens=self.max_new,
        )

    @property
    def key(self) -> str:
        """Names the folder of these settings."""
        text = json.dumps({"version": _VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class _Making:
    """A text under way. facts: set when only rows are missing."""

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    facts: TextFacts | None
    ids: list[int] = field(default_factory=list)
    is_done: bool = False
    error: str = ""


class TextRecorder:
    """The texts of one folder."""

    def __init__(self, cache_dir: Path, settings: RecordSettings) -> None:
        """Makes the folder of these settings below `cache_dir`."""
        self._settings = settings
        self._folder = cache_dir / settings.key
        self._folder.mkdir(parents=True, exist_ok=True)
        about = self._folder / "settings.json"
        if not about.is_file():
            about.write_text(json.dumps(asdict(settings), indent=1) + "\n", encoding="utf-8")

    def missing(
        self, prompts: Sequence[tuple[int, ...]], layers: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Prompts whose text, or rows of these layers, are not there yet, each once.

        Raises ConfigError for a damaged file.
        """
        lacking = []
        for prompt in dict.fromkeys(prompts):
            path = self._path(prompt)
            if not path.is_file() or not read_text(path)[1].issuperset(layers):
                lacking.append(prompt)
        return lacking

    def texts(
        self,
        prompts: Sequence[tuple[int, ...]],
        layers: Sequence[int],
        make_engine: MakeEngine,
        report: Report = lambda done, every, tokens: None,
    ) -> list[RecordedText]:
        """A text per prompt, in order, with rows of `layers`; those missing are made first.

        make_engine is called only then. Raises ConfigError without prompts or for a damaged
        file, ContextTooLong, OutriderError when the engine gives up.
        """
        if not prompts:
            raise ConfigError("there are no prompts to record answers to")
        lacking = self.missing(prompts, layers)
        if lacking:
            longest = max(map(len, lacking)) + self._settings.max_new
            recording = make_engine(sorted(set(layers)), longest)
            try:
                self._make(lacking, recording, report)
            finally:
                recording.engine.close()
        found = []
        for prompt in prompts:
            path = self._path(prompt)
            facts, _ = read_text(path)
            params = self._settings.params(prompt)
            found.append(recorded_text(path, facts, params, self._settings.target_digest))
        return found

    def _path(self, prompt_ids: Sequence[int]) -> Path:
        text = ",".join(map(str, prompt_ids))
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"

    def _make(
        self, prompts: Sequence[tuple[int, ...]], recording: Recording, report: Report
    ) -> None:
        engine = recording.engine
        facts = engine.target.facts
        asked = self._settings
        if (facts.digest, facts.dtype) != (asked.target_digest, asked.dtype):
            raise ConfigError(
                f"texts of target {asked.target_digest} in {asked.dtype} cannot be made by "
                f"{facts.digest} in {facts.dtype}"
            )
        ends = frozenset(facts.eos_token_ids)
        waiting = list(enumerate(prompts))
        under_way: dict[int, _Making] = {}
        done = num_tokens = 0
        while waiting or under_way:
            while waiting and len(under_way) < recording.window:
                number, prompt = waiting.pop(0)
                under_way[number] = self._begin(engine, number, prompt, ends)
            engine.step()
            for number in [n for n, making in under_way.items() if making.is_done]:
                making = under_way.pop(number)
                if making.error:
                    raise OutriderError(making.error)
                num_tokens += self._keep(making, recording, ends)
                done += 1
                report(done, len(prompts), num_tokens)

    def _begin(
        self, engine: Engine, number: int, prompt: tuple[int, ...], ends: frozenset[int]
    ) -> _Making:
        path = self._path(prompt)
        known = read_text(path)[0] if path.is_file() else None
        params = self._settings.params(prompt)
        making = _Making(number, prompt, params, known)
        output: tuple[int, ...] = ()
        most = self._settings.max_new
        if known is not None:
            # All but the last token are given: the last is made again, and rows on the way.
            output, most = known.tokens[known.prompt_len : known.end - 1], known.end - len(prompt)
        going_on = replace(params, max_tokens=most, ignore_eos=True)
        request = GenerationRequest(_name(number), prompt, going_on, output_ids=output)
        key = 0

        def emit(run: TokenRun) -> None:
            making.ids.extend(run.ids)
            making.error = run.error if run.finish_reason is FinishReason.ERROR else ""
            making.is_done = run.finish_reason is not None
            if not making.is_done and _num_beyond(making.ids, ends) >= NUM_BEYOND:
                engine.cancel(key)

        key = engine.submit(request, emit)
        return making

    def _keep(self, making: _Making, recording: Recording, ends: frozenset[int]) -> int:
        """Write what was made; how many tokens."""
        prompt_len = len(making.prompt_ids)
        facts = making.facts
        if facts is None:
            beyond = _num_beyond(making.ids, ends)
            length = len(making.ids) - max(beyond - NUM_BEYOND, 0)
            facts = TextFacts(
                tokens=(*making.prompt_ids, *making.ids[:length]),
                prompt_len=prompt_len,
                end=prompt_len + len(making.ids) - beyond,
                max_len=min(prompt_len + self._settings.max_new, recording.engine.max_context),
                seed=making.params.seed,
            )
        elif making.ids[:1] != [facts.tokens[facts.end - 1]]:
            raise ConfigError(
                f"{self._path(making.prompt_ids).name} was recorded where the same request has "
                "another text: delete the folder it is in, or add layers where it was made"
            )
        rows = recording.rows.take(_name(making.number))
        kept = {layer: part[: facts.end - 1] for layer, part in rows.items()}
        write_text(self._path(making.prompt_ids), facts, kept)
        return len(making.ids)


def _num_beyond(ids: Sequence[int], ends: frozenset[int]) -> int:
    """Tokens after the first that ends the text; 0 when none does."""
    for place, token in enumerate(ids):
        if token in ends:
            return len(ids) - place - 1
    return 0


def _name(number: int) -> str:
    return f"record-{number}"
