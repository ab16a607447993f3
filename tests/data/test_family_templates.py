"""Templates built as the families' own are: what ends a turn in them, and what is appended.

The templates are ours, in the published ones' structure; the tokenizers have the families' special tokens, and a token
for each byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny_model
from tokenizers import Tokenizer as FastTokenizer

from jaxrl.data.stops import stop_ids
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tool_calls import call_id
from jaxrl.data.turns import Between
from jaxrl.models.config import ModelConfig

ALTERNATING = """
{%- for m in said %}{% if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('roles must alternate') }}
{%- endif %}{% endfor %}"""
GEMMA_3 = (
    """
{%- set has = messages[0].role == 'system' %}
{%- set said, first = messages[1:] if has else messages, messages[0].content ~ '\n\n' if has else '' %}"""
    + ALTERNATING
    + """
{{- bos_token }}{% for m in said %}
{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (first if loop.first else '') }}
{{- m.content | trim ~ '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
)
MISTRAL = (
    """
{%- set has = messages[0].role == 'system' %}{% set said = messages[1:] if has else messages %}
{%- set plain = said | rejectattr('role', 'equalto', 'tool') | list %}"""
    + ALTERNATING.replace("said", "plain")
    + """
{{- bos_token }}{% set asked = said | selectattr('role', 'equalto', 'user') | list %}
{%- for m in said %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' ~ (messages[0].content ~ '\n\n' if has and loop.last else '') ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}{{ raise_exception('no id of 9') }}{% endif %}
{{- '[TOOL_RESULTS]' ~ {'content': m.content, 'call_id': m.tool_call_id} | tojson ~ '[/TOOL_RESULTS]' }}
{%- else %}{{ m.content ~ eos_token }}{% endif %}
{%- endfor %}"""
)
SMOLLM_3 = """
{%- set quiet = '<think>\n\n</think>\n' if enable_thinking is defined and not enable_thinking else '' %}
{{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else 'Short.') ~ '<|im_end|>\n' }}
{%- for m in messages %}{% if m.role in ('user', 'tool') %}{{ '<|im_start|>user\n' ~ m.content ~ '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{% generation %}
{{- '<|im_start|>assistant\n' ~ quiet ~ m.content.lstrip('\n') ~ '<|im_end|>\n' }}{% endgeneration %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' ~ quiet }}{% endif %}"""
OLMO_3 = """
{%- for m in messages %}{{ '<|im_start|>' ~ ('environment' if m.role == 'tool' else m.role) ~ '\n' ~ m.content }}
{{- eos_token if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PHI = """
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"""


@dataclass(frozen=True)
class Family:
    """`end`: of a turn; `eos`: the tokenizer's; `eos_ids`: names of what generation_config.json lists."""

    template: str
    eos: str
    end: str
    eos_ids: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    bos: str = "<bos>"
    tool: bool = True


FAMILIES = {
    "gemma": Family(GEMMA_3, "<eos>", "<end_of_turn>", ("<eos>", "<end_of_turn>"), ("<start_of_turn>",), tool=False),
    "mistral": Family(MISTRAL, "</s>", "</s>", ("</s>",), ("[INST]", "[/INST]", "[TOOL_RESULTS]"), "<s>"),
    "smollm3": Family(SMOLLM_3, "<|im_end|>", "<|im_end|>", ("<|im_end|>",)),
    "olmo 3": Family(OLMO_3, "<|endoftext|>", "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    "phi": Family(PHI, "<|endoftext|>", "<|end|>", ("<|endoftext|>", "<|end|>"), ("<|user|>", "<|assistant|>")),
}
TALK = [
    {"role": "user", "content": "So what?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "Good."},
    {"role": "assistant", "content": "Yes."},
]


def write(folder: Path, name: str, **config: Any) -> Path:
    """A folder of a model of a family, its tokens' ids in config.json and generation_config.json as they publish it."""
    family = FAMILIES[name]
    write_tiny_model(folder)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(sorted({family.bos, family.eos, family.end, *family.special}))
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": family.bos, "eos_token": family.eos}))
    (folder / "chat_template.jinja").write_text(family.template.strip(), encoding="utf-8")
    own = {"vocab_size": fast.get_vocab_size(), "eos_token_id": fast.token_to_id(family.eos), **config}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | own))
    if family.eos_ids:
        ids = {"eos_token_id": [fast.token_to_id(token) for token in family.eos_ids]}
        (folder / "generation_config.json").write_text(json.dumps(ids))
    return folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tokenizer]:
    return {name: Tokenizer.from_path(write(tmp_path_factory.mktemp("model"), name)) for name in FAMILIES}


def shown(tokenizer: Tokenizer, ids: Any) -> str:
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_end_stops(name, tmp_path):
    """What ends a turn, and what ends a text, from whichever of the files it comes."""
    folder = write(tmp_path, name)
    tokenizer, family = Tokenizer.from_path(folder), FAMILIES[name]
    ends = {tokenizer.encode(token)[0] for token in (family.eos, family.end, *family.eos_ids)}
    stops = stop_ids(tokenizer, ModelConfig.from_hf(folder).eos_token_ids)
    assert ends <= set(stops)
    of_others = set(stops) - ends
    assert {shown(tokenizer, [i]) for i in of_others} <= {"<|im_end|>", "<|endoftext|>"}  # the tiny tokenizer's own


@pytest.mark.parametrize("name", FAMILIES)
def test_appended_turns_are_those_of_the_whole(name, tokenizers):
    """As a rollout appends them: what was drawn, up to the token that ends a turn, and what comes behind it."""
    tokenizer, family = tokenizers[name], FAMILIES[name]
    between, end = Between(tokenizer), tokenizer.encode(family.end)
    ids = tokenizer.encode(tokenizer.apply_chat_template(TALK[:1]))
    for place in (1, 3):
        said = [*tokenizer.encode(TALK[place]["content"]), *end]
        ids += [*said, *between.answer(TALK[place + 1 : place + 2], said)]
        whole = tokenizer.apply_chat_template(TALK[: place + 2])
        assert shown(tokenizer, ids) == whole
        assert ids == tokenizer.encode(whole)
    assert between.rewritten() == (MOVED if name == "mistral" else "")


MOVED = "the chat template writes earlier turns otherwise than the last one"


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tool])
def test_answers_of_tools_are_appended(name, tokenizers):
    tokenizer, family = tokenizers[name], FAMILIES[name]
    messages = [*TALK[:2], {"role": "tool", "content": "4", "tool_call_id": call_id(0)}]
    end = tokenizer.encode(family.end)[0]
    found = Between(tokenizer).answer(messages[2:], [end])
    before = tokenizer.encode(tokenizer.apply_chat_template(messages[:1]) + TALK[1]["content"])
    assert shown(tokenizer, [*before, end, *found]) == tokenizer.apply_chat_template(messages)
