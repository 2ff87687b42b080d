"""Composed prompts follow from templates, texts and seed; what cannot be filled is refused."""

import json
from pathlib import Path

import pytest

from protos.errors import ConfigError
from verifier_service.data.compose import compose, load_templates, write_prompts

DOCUMENT = """
lists:
  topic: [bread, rivers, chess]
  place: [Ohio, Kenya]
templates:
  article: ["Write about {topic} in {place}.", "What is {topic}?"]
  summary: ["Summarize: {text}", "{text} {text2} In short?"]
"""
TEXTS = [f"text {n}" for n in range(9)]


@pytest.fixture
def templates(tmp_path: Path):
    path = tmp_path / "prompts.yaml"
    path.write_text(DOCUMENT)
    return load_templates(path)


def test_prompts_are_distinct_and_repeat_with_their_seed(templates):
    counts = {"article": 6, "summary": 12}
    first = compose(templates, counts, TEXTS, seed=1)
    assert len({prompt.text for prompt in first}) == 18
    assert first == compose(templates, counts, TEXTS, seed=1)
    assert first != compose(templates, counts, TEXTS, seed=2)


def test_two_texts_of_one_prompt_differ(templates):
    twos = [p.text.split() for p in compose(templates, {"summary": 40}, TEXTS, 0)]
    twos = [words for words in twos if words[-1] == "short?"]
    assert twos
    assert all(words[1] != words[3] for words in twos)


@pytest.mark.parametrize(
    ("counts", "texts", "message"),
    [
        ({"poem": 1}, TEXTS, "no templates of kind poem"),
        ({"summary": 1}, [], "needs texts"),
        ({"article": 10}, TEXTS, "only 9 different"),
    ],
)
def test_what_cannot_be_composed_is_refused(templates, counts, texts, message):
    with pytest.raises(ConfigError, match=message):
        compose(templates, counts, texts, 0)


@pytest.mark.parametrize(
    "document", ["templates: {a: ['{nothing}']}", "templates: {a: ['{']}", "lists: 3", "other: 1"]
)
def test_templates_that_cannot_be_filled_are_refused(tmp_path, document):
    path = tmp_path / "bad.yaml"
    path.write_text(document)
    with pytest.raises(ConfigError):
        load_templates(path)


def test_the_shipped_templates_make_a_prompt_file(tmp_path):
    configs = Path(__file__).parents[3] / "configs" / "train" / "prompts.yaml"
    found = load_templates(configs)
    kinds = dict.fromkeys(found.templates, 5)
    write_prompts(compose(found, kinds, TEXTS, 0), tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 5 * len(kinds)
    assert {line["src"] for line in lines} == set(kinds)
