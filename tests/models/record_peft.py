"""Writes data/lora-<family>.npz: logits and gradients of tiny models with adapters, as peft computes them in float64.

    python tests/models/record_peft.py

Needs torch, transformers and peft. Models and adapters are ours, written by `export_hf` and `export_adapter`, and
loaded by transformers and peft: so names, shapes and the factor in adapter_config.json are peft's reading of them.
transformers computes rope, norms and softmax in float32 whatever the model's type; here they are float64 as well.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import numpy as np  # noqa: E402
from beside import without_our_folder  # noqa: E402
from conftest import LORAS, TOKENS, lively, lora_config  # noqa: E402

from jaxrl.models.lora import without_adapters  # noqa: E402
from jaxrl.models.peft import export_adapter  # noqa: E402
from jaxrl.models.safetensors import export_hf  # noqa: E402

with without_our_folder():
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

DATA = Path(__file__).parent / "data"


class Wide:
    """torch, with float64 under the names of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def record(family: str) -> None:
    config = lora_config(family)
    params = lively(config)
    with tempfile.TemporaryDirectory() as folder:
        export_hf(without_adapters(params), config.base, Path(folder) / "base", dtype=np.float32)
        export_adapter(params, config, Path(folder) / "adapter", np.float32, str(Path(folder) / "base"))
        base = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "base", dtype=torch.float64, attn_implementation="eager"
        )
        model = PeftModel.from_pretrained(base, Path(folder) / "adapter", is_trainable=True).double()
    rotary = base.model.rotary_emb
    half = config.head_dim // 2
    rotary.inv_freq = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    logits = model(torch.tensor(TOKENS)).logits
    weight = torch.tensor(np.random.default_rng(2).normal(size=logits.shape))
    (logits * weight).sum().backward()
    gradients = {
        name.replace(".default.", "."): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and ".layers.1." in name
    }
    assert len(gradients) == 2 * len(LORAS[family].targets)
    np.savez_compressed(
        DATA / f"lora-{family}.npz",
        config=json.dumps(config.to_hf()),
        logits=logits.detach().numpy()[:, ::8],
        **gradients,
    )
    print(family, sorted(gradients)[:2], logits.abs().max().item())


if __name__ == "__main__":
    torch.Tensor.float = torch.Tensor.double
    for module in (modeling_llama, modeling_qwen2, modeling_qwen3):
        module.torch = Wide()
    for family in LORAS:
        record(family)
