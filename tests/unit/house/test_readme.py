"""The README names what there is: commands, paths, request fields, families."""

import re
from pathlib import Path

from cluster.http.openai import ChatRequest, CompletionRequest, StreamOptions
from verifier_service.model.families import SERVED

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def test_the_first_two_commands_are_one_line_each():
    serve, tests, *_ = commands()
    assert "\n" not in serve
    assert serve.endswith(".venv/bin/outrider serve")
    assert "\n" not in tests
    assert ".venv/bin/python -m pytest " in tests


def steps_of_the_test_command() -> list[str]:
    _, tests, *_ = commands()
    return [step.strip().removeprefix(".venv/bin/") for step in tests.split("&&")]


def test_ci_runs_the_steps_of_the_test_command_in_their_order():
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    steps = [
        f"python -m {step}" if step.startswith("pip ") else step
        for step in steps_of_the_test_command()[1:]
    ]
    assert [line for line in script if line in steps] == steps


def test_the_test_command_names_every_folder_with_tests_once():
    runs = [step for step in steps_of_the_test_command() if step.startswith("python -m pytest")]
    named = [word for run in runs for word in run.split() if word.startswith("tests/")]
    files = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(named) == sorted({"/".join(file.parts[:2]) for file in files})
    assert any("-n 2" in run for run in runs)
    assert [run for run in runs if "-n 2" in run and "tests/e2e" in run] == []


def test_paths_named_in_the_readme_exist():
    named = re.findall(r"`((?:cluster|configs|tests|protos|\w+_service)/[\w./-]*)`", README)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def first_column(heading: str) -> set[str]:
    """The words in backquotes of a table's first column."""
    rows = README.split(heading)[1].split("\n|---")[1].split("\n\n")[0].splitlines()[1:]
    return {word for row in rows for word in re.findall(r"`([\w.]+)`", row.split("|")[1])}


def test_every_request_field_is_in_the_table_and_no_other():
    shared = {"model", "prompt", "messages", "stream_options"}
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields} - shared
    fields |= {f"stream_options.{name}" for name in StreamOptions.model_fields}
    assert first_column("## Request fields") == fields


def test_the_families_told_are_those_served():
    assert first_column("## Targets") - {"model_type"} == set(SERVED)
