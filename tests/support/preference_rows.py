"""Conversations and pairs that TRL and jaxrl both read, and the model that train (tests/training/record_trl.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny import CHAT_TEMPLATE, write_tiny_model

from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    found = [_message(roles[i % 2], content) for i, content in enumerate(contents)]
    return [_message("system", system), *found] if system else found


CONVERSATIONS = (
    _turns("1 + 1 = ?", "2", "and 2 + 2 ?", "It is 4."),
    _turns("Name a fruit.", "An apple", system="Be brief."),
    _turns("a", "b", "c", "d", "e", "f\n\ng"),
    _turns("x" * 40, "y" * 25),
)
PAIRS = (
    {"prompt": _turns("Which?"), "chosen": _turns("", "This one.")[1:], "rejected": _turns("", "No.")[1:]},
    {"prompt": _turns("And now?"), "chosen": _turns("", "Go")[1:], "rejected": _turns("", "Wait for a while")[1:]},
    {"prompt": _turns("1 + 1", "2", "2 + 2"), "chosen": _turns("", "4")[1:], "rejected": _turns("", "22")[1:]},
)
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": "sigmoid", "beta": 0.3},
    "robust": {"loss_type": "robust", "beta": 0.5, "label_smoothing": 0.1},
    "ipo": {"loss_type": "ipo", "beta": 0.2},
}


def marked_template() -> str:
    """The tiny model's, with the marks that TRL reads: what the assistant says, and the end of its turn."""
    message = "'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'"
    assert message in CHAT_TEMPLATE
    said = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    marked = f"{{% if message['role'] == 'assistant' %}}{{{{ '<|im_start|>assistant\n' }}}}{said}{{% else %}}"
    return CHAT_TEMPLATE.replace("{{ " + message + " }}", marked + "{{ " + message + " }}{% endif %}")


def written_model(folder: Path) -> tuple[Path, ModelConfig, Any]:
    """The folder, the model, and random weights, which are not in it."""
    path = write_tiny_model(folder)
    model = config_of(path)
    params = jax.jit(lambda key: decoder.init(model, key, "float32"))(jax.random.key(1))
    return path, model, jax.tree.map(lambda x: np.asarray(x) * 3, params)


def moved(params: Any) -> Any:
    """Other weights nearby: a policy that has learnt something."""
    random = np.random.default_rng(3)
    return jax.tree.map(lambda x: (x + 0.05 * random.normal(size=x.shape)).astype(np.float32), params)
