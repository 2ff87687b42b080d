"""Every word of the command line leads to something that can be called."""

import subprocess
import sys

import pytest

from cluster.tools.cli import DISPATCH, main


@pytest.mark.parametrize("target", sorted(set(DISPATCH.values())))
def test_every_dispatched_command_exists(target):
    module, _, function = target.partition(":")
    code = f"import importlib; assert callable(importlib.import_module({module!r}).{function})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    commands = {words[0] for words in DISPATCH} | {"serve", "chat", "validate"}
    assert [word for word in sorted(commands) if word not in text] == []
