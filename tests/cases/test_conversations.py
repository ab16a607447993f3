"""Rows in the layouts of public data sets -> what is learnt, read and refused, one case per row of conversations.jsonl.

A row has `method` (sft, dpo), `template` (of `templates/`), `options` beside the defaults, `row` as it stands in a
data file, and what is right: `learnt`, the texts that are learnt, one for each turn (of a pair: of both); `whole`, all
text of the tokens (of a pair: of both); `counts`, how often a special token is there as a token; `notes`, what a start
says; or `refused`, what the sentence has that refuses the row.

The templates are ours, in the structure of the published ones.
"""

from __future__ import annotations

import copy
import json
import re
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

HERE = Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "conversations.jsonl").read_text().splitlines()]


_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_THINKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOKENS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "chatml": (_CHATML, ()),
    "qwen": (_CHATML, _THINKS),
    "llama": (("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"), ()),
    "mistral": (("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ()),
    "gemma": (("<end_of_turn>", "<bos>", "<start_of_turn>"), ()),
    "phi": (("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), ()),
    "alpaca": (("</s>",), ()),
    "brackets": (("</s>",), ()),
    "vicuna": (("</s>",), ()),
    "last eos": (("</s>",), ()),
    "olmo": (("<|endoftext|>", "<|im_end|>", "<|im_start|>"), ()),
    "harmony": (
        ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|endoftext|>"),
        (),
    ),
    "thinking": (_CHATML, _THINKS),
    "reasoning": (_CHATML, _THINKS),
    "arguments": (_CHATML, ()),
    "joined": (_CHATML, ()),
}
"""Of each template the special tokens, of which the first is the eos, and other tokens."""


@lru_cache
def tokenizer_of(name: str) -> Tokenizer:
    """A token for each byte, and those of the layout."""
    (special, added), alphabet = TOKENS[name], sorted(pre_tokenizers.ByteLevel.alphabet())
    template = HERE / "templates" / f"{name.replace(' ', '_')}.jinja"
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast.add_tokens([AddedToken(token, normalized=False) for token in added])
    with TemporaryDirectory() as name:
        folder = Path(name)
        fast.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))
        (folder / "chat_template.jinja").write_text(template.read_text().strip())
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
