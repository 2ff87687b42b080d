"""The README's commands and .ci/run do the same, and paths that the README names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def test_the_first_two_commands_are_one_line_each():
    serve, tests, *_ = commands()
    assert "\n" not in serve
    assert serve.endswith(".venv/bin/outrider serve")
    assert "\n" not in tests
    assert tests.endswith(".venv/bin/python -m pytest")


def test_ci_runs_the_steps_of_the_test_command():
    _, tests, *_ = commands()
    script = (ROOT / ".ci" / "run").read_text()
    steps = [step.strip().removeprefix(".venv/bin/") for step in tests.split("&&")]
    for step in steps[1:]:
        if step.startswith("pip "):
            step = f"python -m {step}"
        assert step in script, step


def test_paths_named_in_the_readme_exist():
    named = re.findall(r"`((?:cluster|configs|tests|protos|\w+_service)/[\w./-]*)`", README)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
