"""Chat templates: what they give, and the limits of time, size and memory."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl.data import chat_template
from jaxrl.data.chat_template import RefusedMessages, render

ASK = [{"role": "user", "content": "hi"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SAID = "{{ messages[0].content }}"
WORDY = LOOPS.replace("{% endfor %}", " {% endfor %}")


def test_a_template_is_rendered():
    assert render("{{ bos_token }}{{ messages[0].content }}", "file", ASK, {"bos_token": "<s>"}) == "<s>hi"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOPS, "takes more than 1 s for a short conversation"),
        ("{{ 9 ** (9 ** 9) }}", "takes more than 1 s for a short conversation"),  # constant: computed by the compiler
        ("{% set n = 'x' * (messages | length * 2**31) %}", "takes more than 1024 MiB of memory"),  # at once
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "writes more than 1048576 characters"),
        ("x" * 2**21, "has 2097152 characters, more than 1048576"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is nested too deeply"),
        ("hello", "writes the same whatever the user says"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "writes the same"),
    ],
)
def test_a_template_that_cannot_be_used(source: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 1)
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"^file: the chat template {words}") as caught:
        render(source, "file", ASK, {})
    assert not isinstance(caught.value, RefusedMessages)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (SAID + "{% if messages[0].content == 'hi' %}" + WORDY + "{% endif %}", "writes"),
        ("{{ messages[0].content.nothing.more }}", "refuses these messages: 'str object' has no attribute 'nothing'"),
        (SAID + "{{ 1 // (messages[0].content | length - 2) }}", "fails with these messages: integer"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails with these messages: maximum recursion depth"),
    ],
)
def test_messages_that_a_template_does_not_take(source: str, words: str):
    with pytest.raises(RefusedMessages, match=f"^file: the chat template {words}"):
        render(source, "file", ASK, {})


@pytest.mark.parametrize(
    "source",
    [
        LOOPS.replace("{% endfor %}{%", "{% endfor %} {%"),
        LOOPS,
        f"{{% set kept %}}{LOOPS}{{% endset %}}",
        f"{{% macro f() %}}{LOOPS}{{% endmacro %}}{{{{ f() }}}}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for n in [60] recursive %}{% if n %}{% set a = loop([n - 1]) %}{% set b = loop([n - 1]) %}{% endif %}"
        "{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) if false %}{% else %}{% endfor %}{% endfor %}",
    ],
)
def test_the_time_of_one_conversation(source: str, monkeypatch: pytest.MonkeyPatch):
    """Looked at also where nothing is written."""
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.05)
    template = chat_template._compiled(source)
    with pytest.raises(RefusedMessages, match=r"takes more than 0\.05 s with these messages"):
        chat_template._rendered_or_refused(template, "file", ASK, {})


def test_what_looks_at_the_time_is_no_variable():
    assert chat_template.variables_of(SAID + "{% for i in range(n) %}{% endfor %}", "file") == {"messages", "n"}


def test_the_trial_is_made_once(monkeypatch: pytest.MonkeyPatch):
    trials = []
    monkeypatch.setattr(chat_template, "_try", lambda *arguments: trials.append(arguments))
    for text in ("a", "b"):
        assert render("once {{ messages[0].content }}", "file", [{"content": text}], {}) == f"once {text}"
    assert len(trials) == 1


ASKED = f"from jaxrl.data.chat_template import render; print(render('{SAID}', 'file', [dict(content='hi')], dict()))"


def assert_says_hi(folder: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("hi\n", "")


def test_below_a_lower_limit_of_the_shell(tmp_path: Path):
    assert_says_hi(tmp_path, "bash", "-c", f'ulimit -v 900000; exec "$0" -c "{ASKED}"', sys.executable)


def test_the_working_folder_hides_none_of_pythons_modules(tmp_path: Path):
    (tmp_path / "re.py").write_text("raise SystemExit('a module of the user')")
    own_first = ASKED.replace("; ", "; import sys; sys.path.insert(0, str()); ")
    assert_says_hi(tmp_path, sys.executable, "-P", "-c", f"import re; {own_first}")
