"""The dispatcher: exit codes, one-sentence errors, --json alone on stdout."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types

import pytest

from luban.bench import BENCHES
from luban.cli import main as cli
from luban.cli import output
from luban.errors import ConfigError, LubanError
from luban.recipes import RECIPES


@pytest.fixture
def command(monkeypatch):
    """Registers a command `probe` whose run is what the test sets."""
    module = types.ModuleType("luban.cli.probe")
    module.configure = lambda parser: parser.add_argument("--count", type=int)
    module.run = lambda args: {"count": args.count}
    module.text = lambda result: f"count {result['count']}"
    monkeypatch.setitem(sys.modules, "luban.cli.probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", "a command of the tests")
    monkeypatch.delenv("LUBAN_DEBUG", raising=False)
    return module


def test_text_and_json(command, capsys):
    assert cli.main(["probe", "--count", "3"]) == 0
    assert capsys.readouterr().out == "count 3\n"
    assert cli.main(["probe", "--count", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"count": 3}


def test_json_has_no_nan(command, capsys):
    command.run = lambda args: {"loss": float("nan"), "rows": [(float("inf"), 1.5)], "more": {"x": -float("inf")}}
    assert cli.main(["probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"loss": None, "rows": [[None, 1.5]], "more": {"x": None}}


def test_json_stands_alone_whatever_the_work_prints(command, capsys):
    def run(args):
        print("chatter")
        return {"x": 1}

    command.run = run
    assert cli.main(["probe", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"x": 1} and err == "chatter\n"


@pytest.mark.parametrize(
    "error, code",
    [(LubanError("it broke; mend it"), 1), (ConfigError("no such thing; choose another"), 2), (ValueError("a\nb"), 1)],
)
def test_errors_are_one_line(command, capsys, error, code):
    def run(args):
        raise error

    command.run = run
    assert cli.main(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("luban: ") and err.count("\n") == 1 and "Traceback" not in err
    assert cli.main(["probe", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and "\n" not in answer["error"]


def test_a_traceback_only_when_asked_for(command, capsys, monkeypatch):
    def run(args):
        raise LubanError("it broke")

    command.run = run
    monkeypatch.setenv("LUBAN_DEBUG", "1")
    assert cli.main(["probe"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("result, code", [({"ok": True}, 0), ({"ok": False}, 1), ({"interrupted": True}, 130)])
def test_exit_code_of_a_result(command, result, code):
    command.run, command.text = lambda args: result, lambda r: ""
    assert cli.main(["probe"]) == code


def test_wrong_usage(command, capsys):
    assert cli.main(["probe", "--count", "many"]) == 2
    assert "--count" in capsys.readouterr().err
    assert cli.main(["probe", "--cou", "3"]) == 2, "options are not guessed from their beginnings"
    assert cli.main([]) == 2
    assert cli.main(["doctr"]) == 2
    assert "did you mean doctor?" in capsys.readouterr().err
    assert cli.main(["doctr", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert cli.main(["--version"]) == 0


@pytest.mark.parametrize(
    "argv, reason",
    [
        ("probe --count many", "argument --count: invalid int value: 'many'; see `luban probe --help`"),
        ("probe --count", "argument --count: expected one argument; see `luban probe --help`"),
        ("probe --coun 3", "unrecognized arguments: --coun 3; did you mean --count?; see `luban probe --help`"),
        ("probe extra", "unrecognized arguments: extra; see `luban probe --help`"),
        ("train", f"the following arguments are required: RECIPE ({' or '.join(RECIPES)}); see `luban train --help`"),
        ("bench", f"the following arguments are required: NAME ({' or '.join(BENCHES)}); see `luban bench --help`"),
        (
            "train gpt --stepz=3",
            "unrecognized arguments: --stepz=3; did you mean --steps?; see `luban train gpt --help`",
        ),
        (
            "train gtp",
            f"argument RECIPE: invalid choice: 'gtp' (choose from {str(list(RECIPES))[1:-1]}); see `luban train --help`",
        ),
    ],
)
def test_wrong_usage_is_one_sentence_and_one_object(command, capsys, argv, reason):
    assert cli.main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"luban: {reason}\n"
    assert cli.main([*argv.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ok": False, "error": reason} and err == f"luban: {reason}\n"


def test_an_interruption_is_one_object_too(command, capsys):
    def run(args):
        raise KeyboardInterrupt

    command.run = run
    assert cli.main(["probe", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"ok": False, "error": "interrupted"}


def test_the_overview_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


def test_a_closed_pipe_is_no_error():
    code = "import sys; from luban.cli.main import main; sys.exit(main(['recipes']))"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 0


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def test_colour_only_for_a_person(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.paint("x", "red", Terminal()) == "\033[31mx\033[0m"
    assert output.paint("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.paint("x", "red", Terminal()) == "x"


def test_columns_and_sizes():
    assert output.columns([("a", 1), ("long", 22)]) == "a     1\nlong  22"
    assert output.columns([]) == ""
    assert [output.size(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
