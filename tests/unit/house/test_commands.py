"""Every word of the command line leads to something that can be called."""

import subprocess
import sys

import pytest

from cluster.tools.cli import DISPATCH, main

EACH_ALONE = """
import os
import sys
from importlib import import_module

# What takes long to import and is not ours: once for all.
import pydantic, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

for target in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    module, _, function = target.partition(":")
    if callable(getattr(import_module(module), function)):
        print(target)
    sys.stdout.flush()
    os._exit(0)
"""


def test_every_dispatched_command_exists_and_is_imported_alone():
    targets = sorted(set(DISPATCH.values()))
    done = subprocess.run(
        [sys.executable, "-c", EACH_ALONE, *targets], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == targets, done.stderr


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    commands = {words[0] for words in DISPATCH} | {"serve", "chat", "validate"}
    assert [word for word in sorted(commands) if word not in text] == []
