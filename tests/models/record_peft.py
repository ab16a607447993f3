"""Writes data/lora-<family>.npz: logits and gradients of tiny models with adapters, as peft computes them in float64;
and data/peft-adapter: adapters that peft has made and written, with its logits.

    python tests/models/record_peft.py

Needs torch, transformers and peft. Models and adapters are ours, written by `export_hf` and `export_adapter`, and
loaded by transformers and peft: so names, shapes and the factor in adapter_config.json are peft's reading of them. In
data/peft-adapter the model alone is ours.
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
    from peft import LoraConfig, PeftModel, get_peft_model
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


def _widen_rope(base: Any, config: Any) -> None:
    half = config.head_dim // 2
    base.model.rotary_emb.inv_freq = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)


def record_adapter() -> None:
    config = lora_config("llama").base
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        export_hf(lively(config), config, folder, dtype=np.float32)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    modules = r".*\.(self_attn\.[qo]_proj|mlp\.\w+_proj)"
    asked = LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=modules, exclude_modules=["up_proj"], lora_dropout=0.1
    )
    model = get_peft_model(base, asked).to(torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    base.name_or_path = model.peft_config["default"].base_model_name_or_path = "tiny"
    model.save_pretrained(DATA / "peft-adapter")
    (DATA / "peft-adapter" / "README.md").unlink()
    model = model.double()
    _widen_rope(base, config)
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits
    np.savez_compressed(DATA / "peft-adapter" / "logits.npz", logits=logits.numpy()[:, ::8])


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
    _widen_rope(base, config)
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
    record_adapter()
    for family in LORAS:
        record(family)
