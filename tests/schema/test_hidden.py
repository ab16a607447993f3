"""Secrets in texts: a key in every form in which a server may repeat it, and passwords in URLs."""

import base64
import html
import itertools
import json
import time
from urllib.parse import quote, quote_plus

import pytest

from jaxrl.schema.hidden import hider

KEY = 'sk-Very"secret/+\\K%9 z&'
FORMS = {
    "as it is": lambda key: key,
    "JSON": json.dumps,
    "JSON in JSON": lambda key: json.dumps(json.dumps(key)),
    "JSON, all by number": lambda key: "".join(f"\\u{ord(each):04x}" for each in key),
    "repr": repr,
    "by number": lambda key: "".join(f"\\x{ord(each):02X}" for each in key),
    "of a URL": lambda key: quote(key, safe=""),
    "of a path": quote,
    "of a form": quote_plus,
    "of a URL in a URL": lambda key: quote(quote(key, safe=""), safe=""),
    "all percent": lambda key: "".join(f"%{ord(each):02x}" for each in key),
    "HTML": html.escape,
    "HTML by number": lambda key: "".join(f"&#{ord(each)};" for each in key),
    "hexadecimal": lambda key: key.encode().hex(),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of a header": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "base64 of a pair": lambda key: base64.b64encode(f"me:{key}\n".encode()).decode(),
    "base64 of one more": lambda key: base64.b64encode(f"x{key}yy".encode()).decode(),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(f"??{key}".encode()).decode(),
    "base64 in a URL": lambda key: quote(base64.b64encode(f"??{key}".encode()).decode(), safe=""),
    "base64 in lines": lambda key: base64.encodebytes(bytes(range(50)) + key.encode()).decode(),
}


def test_a_key_is_found_in_every_form():
    for key, form in itertools.product((KEY, "sk-very-secret", "0123456789abcdef"), FORMS):
        told = FORMS[form](key)
        assert len(told) >= len(key)
        found = hider(key)(f"before {told} after")
        assert "***" in found, (key, form)
        assert found.startswith("before ")
        assert found.endswith(" after")
        for part in (told[i : i + 6] for i in range(len(told) - len(key), len(told) - 6)):
            assert part not in found, (key, form)  # the last characters are all of the key


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("http://user:PASS@host/v1", "http://***@host/v1"),
        ("see http://user:p@ss@host:80.", "see http://***@host:80."),
        ("'https://user:p/a?s#s@host' and ftp://b:c@d", "'https://***@host' and ftp://***@d"),
        ("http://token@host", "http://***@host"),
        ("http://localhost:8000/v1/@x and a@b", "http://localhost:8000/v1/@x and a@b"),
    ],
)
def test_passwords_of_urls(told: str, shown: str):
    assert hider()(told) == hider(KEY)(told) == shown


def test_other_text_stays():
    text = "Score: 7. The secret is very out; sk-very-secreT, c2stdmVyeS1, %73%6b"
    assert hider("sk-very-secret")(text) == hider("")(text) == text


@pytest.mark.parametrize("text", ["\\", "://a:x", "c2sd", "%25"])
def test_the_time_grows_with_the_length(text: str):
    hide, took_s = hider("sk-very-secret"), []
    for count in (1 << 14, 1 << 17):
        runs = []
        for _ in range(3):
            began_s = time.process_time()  # of this process alone, whatever else runs
            hide(text * (count // len(text)))
            runs.append(time.process_time() - began_s)
        took_s.append(min(runs))
    assert took_s[1] < 40 * max(took_s[0], 1e-3)  # eight times the text
