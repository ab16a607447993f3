"""Chat templates: what they give, and what is refused."""

import pytest

from jaxrl.data.chat_template import RefusedMessages, render

ASK = [{"role": "user", "content": "hi"}]
SAID = "{{ messages[0].content }}"


def test_a_template_that_cannot_be_used():
    with pytest.raises(ValueError, match=r"^file: the chat template is no jinja template \(") as caught:
        render("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "file", ASK, {})
    assert not isinstance(caught.value, RefusedMessages)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content.nothing.more }}", "refuses these messages: 'str object' has no attribute 'nothing'"),
        (SAID + "{{ 1 // (messages[0].content | length - 2) }}", "fails with these messages: integer"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails with these messages: maximum recursion depth"),
    ],
)
def test_messages_that_a_template_does_not_take(source: str, words: str):
    with pytest.raises(RefusedMessages, match=f"^file: the chat template {words}"):
        render(source, "file", ASK, {})
