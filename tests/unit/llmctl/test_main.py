"""The command line: usage errors are 2, options stand before or after the verb, every verb has help, the start is short."""

from __future__ import annotations

import importlib
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl import find, generate
from llmctl.main import _parser, main
from llmctl.verb import seconds as to_seconds
from llmctl.verbs import VERBS, module_of
from tests.daemon import SLOW


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("restart now", ("restart: 'now' is more than it takes", "usage: llmctl restart [--no-wait] [--all]")),
        ("status --nope", ("status: there is no option --nope",)),
        ("status --wach", ("did you mean `--watch`?",)),
        ("kv --json", ("did you mean `-o json`?",)),
        ("--ouput json kv", ("there is no option --ouput", "did you mean `--output`?")),
        ("status -o xml", ("--output: 'xml' is none of table, wide, json, yaml",)),
        ("reload weight", ("'weight' is none of config, weights", "did you mean `weights`?")),
        ("log-level", ("LEVEL is missing", "usage: llmctl log-level debug|info|")),
        ("abort", ("one of the arguments RID --client-id --all is required",)),
        ("status --timeout -1", ("--timeout",)),
        ("-i ../x status", ("not an instance name",)),
        ("reload weights a b", ("'b' is more than it takes",)),
        ("logs -n x", ("expected a whole number", "usage: llmctl logs [PROCESS]... [--lines N] [--follow] [--dir DIR]")),
    ],
)
def test_a_bad_command_line_is_2_and_says_what_was_meant(line: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and all(words in shown.err for words in said), shown.err
    assert "--help" in shown.err and len(shown.err.splitlines()) <= 4


@pytest.mark.parametrize(
    ("verb", "text"), [("statsu", "did you mean `llmctl status`?"), ("xyzzy", "there are: status, "), ("bogus", "there are: status, "), ("tpo", "llmctl top")]
)
def test_an_unknown_verb_is_2_and_names_the_nearest(verb: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == 2
    assert f"there is no verb {verb!r}" in (said := capsys.readouterr().err) and text in said


def test_no_verb_is_2_and_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "exit status:" in shown.err


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_there_is_one_file_for_each_verb() -> None:
    folder = Path(sys.modules["llmctl.verbs"].__file__ or "").parent
    assert {path.stem.replace("_", "-") for path in folder.glob("[a-z]*.py")} == set(VERBS)


def test_options_before_and_after_the_verb() -> None:
    before = _parser("status").parse_args(["-o", "json", "--timeout", "3s", "status"])
    after = _parser("status").parse_args(["status", "-o", "json", "--timeout", "3s"])
    assert before == after and after.output == "json" and after.timeout == 3.0


def test_an_options_value_is_not_taken_for_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--reason", "stop", "--socket", str(tmp_path), "status"]) == 3
    assert "stopped" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "seconds"), [("2", 2.0), ("500ms", 0.5), ("30s", 30.0), ("5min", 300.0), ("1h", 3600.0), ("1.5s", 1.5)])
def test_times(text: str, seconds: float) -> None:
    assert to_seconds(text) == seconds


def test_where_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    environ = {"XDG_RUNTIME_DIR": "/xdg", "TMPDIR": "/t"}
    assert [str(p.run_dir) for p in find.places(None, None, environ)] == ["/run/llmd", "/xdg/llmd", f"/t/llmd-{uid}", f"/tmp/llmd-{uid}"]
    assert [str(p.run_dir) for p in find.places(None, "a", environ)] == ["/run/llmd-a", "/xdg/llmd-a", f"/t/llmd-a-{uid}", f"/tmp/llmd-a-{uid}"]
    assert [str(p.socket) for p in find.places("/s/x.sock", None, {"LLMD_SOCKET": "/other"})] == ["/s/x.sock"]
    assert [str(p.socket) for p in find.places(None, None, {"LLMD_SOCKET": "/other/y.sock"})] == ["/other/y.sock"]
    assert find.places(None, "a", environ | {"LLMD_SOCKET": "/other/y.sock"}) == find.places(None, "a", environ), "what is typed wins"


def test_the_start_is_short_and_imports_little() -> None:
    code = "import sys; from llmctl.main import main; main(['status', '--socket', '/nowhere/x.sock']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30 * SLOW, check=True)
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "llmctl.main", "status", "--socket", "/nowhere/x.sock"], capture_output=True, timeout=30 * SLOW, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3, "CPU time, which other work on the machine hardly changes"
    assert not {"torch", "transformers", "httpx", "yaml", "msgspec", "zmq"} & set(done.stderr.split())


def test_what_follows_from_the_table_is_up_to_date() -> None:
    root = Path(__file__).parents[3]
    for name, content in generate.FILES.items():
        assert (root / name).read_text() == content(), f"{name}: make docs"


def test_every_example_is_a_command_line_that_parses() -> None:
    for name, verb in VERBS.items():
        for line, _ in verb.examples:
            argv = shlex.split(line.partition(" &&")[0])
            assert argv[0] == name and _parser(name).parse_args(argv).verb == name, line


def test_every_verb_has_a_docstring_and_a_run() -> None:
    for name in VERBS:
        module = importlib.import_module(module_of(name))
        assert module.__doc__ and callable(module.run), name


BASH = """
llmctl() { case "$*" in
  "requests -o json") printf '      "request": "%s",\\n      "client_id": "%s"\\n' cmpl-1 job-7 cmpl-2 job-8 ;;
  "config keys") printf '%s\\n' http.host http.port model.path ;;
  "crashes -o json") echo '    "id": "20260101T000000Z-scheduler-0-7-1",' ;;
  "audit -o json") echo '    "operation_id": "op-77"' ;;
esac; }
source packaging/completions/llmctl.bash
COMP_WORDS=(@LINE@); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _llmctl; echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("sta", "status"),
        ("-o j", "json"),
        ("--reason stop sta", "status"),
        ("config ex", "explain"),
        ("config explain http.", "http.host http.port"),
        ("reload --mode ab", "abort"),
        ("wait --for = re", "ready"),
        ("wait --for v", "version="),
        ("wait --for = ", "ready drained stopped version="),
        ("wait --operation ''", "op-77"),
        ("abort ''", "cmpl-1 cmpl-2"),
        ("abort --client-id job-", "job-7 job-8"),
        ("abort cmpl-1 ''", ""),
        ("crashes 2026", "20260101T000000Z-scheduler-0-7-1"),
        ("logs -n 5 sched", "scheduler scheduler-0"),
        ("logs control-0 front", "frontend frontend-0"),
        ("log-level ''", "debug info warning error default"),
        ("log-level debug det", "detokenizer detokenizer-0"),
        ("audit --verb dr", "drain"),
        ("restart --al", "--all"),
        ("requests --reason ''", ""),
    ],
)
def test_bash_completes_verbs_options_and_values(words: str, wanted: str) -> None:
    """As readline splits them: at `=` too."""
    script = BASH.replace("@LINE@", f"llmctl {words}" if not words.endswith("= ") else f"llmctl {words}''")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20 * SLOW, check=True, cwd=Path(__file__).parents[3])
    assert done.stdout.split() == wanted.split(), done.stderr


@pytest.mark.parametrize(("shell", "file"), [("bash", "llmctl.bash"), ("zsh", "_llmctl"), ("fish", "llmctl.fish")])
def test_completions_are_scripts_of_their_shell(shell: str, file: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", f"packaging/completions/{file}"], timeout=20 * SLOW, check=True, cwd=Path(__file__).parents[3])
