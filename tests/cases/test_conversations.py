"""Rows in the layouts of public data sets -> what is learnt, read and refused, one case per row of conversations.jsonl.

A row's fields: `method` (sft, dpo), `template` (of `TEMPLATES`), `options` beside the defaults, `row` as it stands in a
data file, and what is right: `learnt`, the texts that are learnt, one for each turn (of a pair: of both); `whole`, all
text of the tokens (of a pair: of both); `counts`, how often a special token is there as a token; `notes`, what a start
says; or `refused`, what the sentence has that refuses the row.

The templates are ours, in the structure of the published ones.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from keyword_options import with_options
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from jaxrl.config import Config
from jaxrl.data.conversations import ConversationTokens, Example, read_demonstrations, read_pairs
from jaxrl.data.tokenizer import Tokenizer

CASES = [json.loads(line) for line in (Path(__file__).parent / "conversations.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Layout:
    """`special`: tokens besides the eos, which comes first."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()


BEGINS_CHATML = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = """
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"""
QWEN = """
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '</tools>' }}
{{- '<|im_end|>\n' }}{% endif %}
{%- set at = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- if m.reasoning_content and loop.index0 > at.last %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}
{%- endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{% if c.function %}{% set c = c.function %}{% endif %}
{{- '<tool_call>{"name": "' ~ c.name ~ '", "arguments": ' ~ (c.arguments | tojson) ~ '}</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}
{%- endfor %}"""
LLAMA = """
{{- '<|begin_of_text|>' }}
{%- macro head(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}{% endmacro %}
{%- if tools %}{{ head('system') ~ tools | tojson ~ '<|eot_id|>' }}{% endif %}
{%- for m in messages %}{{ head('ipython' if m.role == 'tool' else m.role) }}
{%- if m.tool_calls %}{% set c = m.tool_calls[0].function %}
{{- '{"name": "' ~ c.name ~ '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}
{%- else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""
MISTRAL = """
{{- '<s>' }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}' }}
{{- '' if loop.last else ', ' }}{% endfor %}{{ ']</s>' }}
{%- elif m.role == 'assistant' %}{{ m.content ~ '</s>' }}
{%- else %}{{ '[SYSTEM_PROMPT]' ~ m.content ~ '[/SYSTEM_PROMPT]' }}{% endif %}{% endfor %}"""
GEMMA = """
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{- '<bos>' }}{% for m in messages %}
{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ m.content ~ '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
PHI = """
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}"""
ALPACA = """
{%- set names = {'user': 'Instruction', 'assistant': 'Response', 'system': 'Rules', 'tool': 'Input'} %}
{%- for m in messages %}{{ '### ' ~ names[m.role] ~ ':\n' ~ m.content ~ '\n\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"""
BRACKETS = """
{%- for m in messages %}{{ '[' ~ m.role ~ ']' ~ m.content ~ '[END]\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""
VICUNA = """
{%- for m in messages %}{% if m.role == 'assistant' %}{{ 'ASSISTANT: ' ~ m.content ~ '</s>' }}
{%- else %}{{ ('' if m.role == 'system' else 'USER: ') ~ m.content ~ '\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"""
LAST_EOS = """
{%- for m in messages %}{{ '\n## ' ~ m.role ~ '\n' ~ m.content }}{% endfor %}
{{- '\n## assistant\n' if add_generation_prompt else '</s>' }}"""
OLMO = """
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}
{{- '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}"""
HARMONY = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
THINKER = """
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.FIELD %}{{ '<think>' ~ m.FIELD ~ '</think>' }}{% endif %}{{ m.content ~ '<|im_end|>\n' }}{% endfor %}"""
AS_TEXT = """
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}
{%- for c in m.tool_calls or [] %}{{ 'call ' + c.function.name + ' ' }}ARGUMENTS{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}"""
_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_THINKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATES = {
    "chatml": Layout(CHATML + BEGINS_CHATML, _CHATML),
    "qwen": Layout(QWEN + BEGINS_CHATML, _CHATML, _THINKS),
    "llama": Layout(LLAMA, ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")),
    "mistral": Layout(MISTRAL, ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]")),
    "gemma": Layout(GEMMA, ("<end_of_turn>", "<bos>", "<start_of_turn>")),
    "phi": Layout(PHI, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")),
    "alpaca": Layout(ALPACA, ("</s>",)),
    "brackets": Layout(BRACKETS, ("</s>",)),
    "vicuna": Layout(VICUNA, ("</s>",)),
    "last eos": Layout(LAST_EOS, ("</s>",)),
    "olmo": Layout(OLMO + BEGINS_CHATML, ("<|endoftext|>", "<|im_end|>", "<|im_start|>")),
    "harmony": Layout(
        HARMONY, ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|endoftext|>")
    ),
    "thinking": Layout(THINKER.replace("FIELD", "thinking") + BEGINS_CHATML, _CHATML, _THINKS),
    "reasoning": Layout(THINKER.replace("FIELD", "reasoning") + BEGINS_CHATML, _CHATML, _THINKS),
    "arguments": Layout(AS_TEXT.replace("ARGUMENTS", "{{ c.function.arguments }}") + BEGINS_CHATML, _CHATML),
    "joined": Layout(AS_TEXT.replace("ARGUMENTS", "{{ '' + c.function.arguments + '' }}") + BEGINS_CHATML, _CHATML),
}


@lru_cache
def tokenizer_of(name: str) -> Tokenizer:
    """A token for each byte, and those of the layout."""
    layout, alphabet = TEMPLATES[name], sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in layout.special])
    fast.add_tokens([AddedToken(token, normalized=False) for token in layout.added])
    with TemporaryDirectory() as name:
        folder = Path(name)
        fast.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": layout.special[0]}))
        (folder / "chat_template.jinja").write_text(layout.template.strip())
        return Tokenizer.from_path(folder)


@lru_cache
def config_of(options: str) -> Config:
    return with_options({"model": {"path": "unused"}, "data": {"max_prompt_length": 900}}, json.loads(options))


def learnt_in(tokenizer: Tokenizer, example: Example) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.is_said.astype(int), [0]]))).reshape(-1, 2)
    return [tokenizer.decode(example.response[a:b].tolist(), skip_special_tokens=False) for a, b in edges]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_row(case: dict[str, Any], tmp_path: Path):
    config = config_of(json.dumps(case.get("options", {})))
    tokenizer = copy.copy(tokenizer_of(case["template"]))
    tokenizer.special_tokens_in_content = config.data.special_tokens_in_content
    tokens = ConversationTokens(tokenizer, tokenizer.stop_token_ids, config)
    read = read_pairs if case["method"] == "dpo" else read_demonstrations
    names = [str(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").write_text(json.dumps(case["row"]) + "\n")
    if "refused" in case:
        with pytest.raises(ValueError, match=f"line 1.*{re.escape(case['refused'])}"):
            read(names, "data.train_files", config, tokens)
        return
    examples = read(names, "data.train_files", config, tokens)[0].examples
    found = [[*each.prompt.tolist(), *each.response.tolist()] for each in examples]
    assert [learnt_in(tokenizer, each) for each in examples] == case["learnt"]
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in found] == case["whole"]
    for token, count in case.get("counts", {}).items():
        assert sum(i == tokenizer.vocabulary[token] for ids in found for i in ids) == count
    if "notes" in case:
        assert len(tokens.notes) == len(case["notes"])
        assert all(part in note for part, note in zip(case["notes"], tokens.notes, strict=True))
