"""The console script's table of commands."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from dspark_jax import cli


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize(("words", "message"), [([], "no command"), (["frobnicate"], "command 'frobnicate': unknown")])
def test_unknown_commands_list_the_existing_ones(words, message, capsys):
    assert cli.main(words) == 2
    assert f"{message}, must be one of serve, train, data" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_a_command_gets_its_words_and_gives_its_code(name, monkeypatch):
    module = ModuleType("fake")
    module.main = lambda argv: {"--ok": None, "--bad": 3}[argv[0]]
    monkeypatch.setitem(sys.modules, cli.COMMANDS[name][0], module)
    assert cli.main([name, "--ok"]) == 0
    assert cli.main([name, "--bad"]) == 3
