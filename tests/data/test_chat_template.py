"""Chat templates: what they give, and the limits of time, size and memory."""

import time

import pytest

from jaxrl.data import chat_template
from jaxrl.data.chat_template import RefusedMessages, render

ASK = [{"role": "user", "content": "hi"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SAID = "{{ messages[0].content }}"
LARGE = r"makes a value of more than \d+ characters for a short conversation"
WORDY = LOOPS.replace("{% endfor %}", " {% endfor %}")


def test_a_template_is_rendered():
    assert render("{{ bos_token }}{{ messages[0].content }}", "file", ASK, {"bos_token": "<s>"}) == "<s>hi"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOPS, "takes more than 1 s for a short conversation"),
        ("{{ 9 ** (9 ** 9) }}", LARGE),  # constant: jinja would compute it while it compiles
        ("{% set n = 'x' * (messages | length * 2**31) %}", LARGE),
        ("{% set n = [messages[0].content * 1000] * 9999 %}", LARGE),
        ("{% set x = 'xx' %}" + "{% set x = x ~ x %}" * 99, LARGE),
        ("{% set x = 'xx' %}" + "{% set x = x + x %}" * 99, LARGE),
        ("{% set x = 'xx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 99, "writes more than"),
        ("{{ 'x' | center(10**12) }}", LARGE),
        ("{{ 'x'.ljust(10**12) }}", LARGE),
        ("{{ ('x' * 9999).replace('x', 'y' * 9999) }}", LARGE),
        ("{{ ('x' * 9999) | replace('x', 'y' * 9999) }}", LARGE),
        ("{{ ('\\n' * 9999) | indent(9999) }}", LARGE),
        ("{{ '%999999999999d' % 1 }}{{ '%*d' % (10**12, 1) }}", LARGE),
        ("{{ '%*d' % (10**12, 1) }}", LARGE),
        ("{{ '{:999999999999}'.format(1) }}", LARGE),
        ("{{ '{:{}}'.format(1, 10**12) }}", LARGE),
        ("{{ '{a:999999999999}'.format_map({'a': 1}) }}", LARGE),
        ("{{ '%.*f' | format(10**12, 1) }}", LARGE),
        ("{{ [1] | batch(10**12, 'x') | list }}", LARGE),
        ("{{ [1] | slice(10**12) | list }}", LARGE),
        ("{{ messages | tojson(indent=10**12) }}", LARGE),
        ("{{ 1.5 | round(10**12, 'ceil') }}", LARGE),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "writes more than"),
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
    """Checked also where nothing is written."""
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.05)
    with pytest.raises(RefusedMessages, match=r"takes more than 0\.05 s with these messages"):
        render(SAID + "{% if messages[0].content == 'hi' %}" + source + "{% endif %}", "file", ASK, {})


def test_what_looks_at_the_time_is_no_variable():
    assert chat_template.variables_of(SAID + "{% for i in range(n) %}{% endfor %}", "file") == {"messages", "n"}


def test_operators_are_those_of_jinja():
    source = (
        "{{ 3 * 4 }} {{ 'ab' * 2 }} {{ 'ab' * -1 }}{{ 2 ** 3 }} {{ '%s%%' % 3 }} {{ 1 + 2.5 }} {{ 1 ~ nothing ~ [2] }}"
    )
    said = "{{ 'a' | center(3) }}|{{ messages[0].content | replace('h', 'H', count=1) }}"
    said += "{{ '{}-{:>2} 9999999999'.format(1, 2) }}{{ [1] | tojson }}"
    assert render(source + said, "file", ASK, {}) == "12 abab 8 3% 3.5 1[2] a |Hi1- 2 9999999999[1]"


def test_the_trial_is_made_once(monkeypatch: pytest.MonkeyPatch):
    trials, rendered = [], chat_template._rendered
    monkeypatch.setattr(chat_template, "_rendered", lambda *given: (trials.append(given), rendered(*given))[1])
    for text in ("a", "b"):
        assert render("once {{ messages[0].content }}", "file", [{"content": text}], {}) == f"once {text}"
    assert len(trials) == 6 + 2
