"""Compares drawn models of every family with transformers, in float64: logits, and every gradient, to 1e-9.

    python tests/models/compare_drawn.py --count 20                 # of each family
    python tests/models/compare_drawn.py --family gemma3_text --first 7 --count 1
    python tests/models/compare_drawn.py --record                   # writes data/drawn.npz

Needs torch and transformers. A drawn config.json (`tests/support/drawn_models.py`) is read, its model exported with
random weights, and transformers computes from the drawn config.json with the exported weights, and from the exported
one; the export is read again, and must have every weight bit for bit.

`data/drawn.npz` has some of them for tests without torch: the drawn config.json, logits at some positions, and each
gradient's sum, and its sum with signs.
"""

import argparse
import importlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # each model is compiled, and runs once
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)

import numpy as np  # noqa: E402
from beside import without_our_folder  # noqa: E402
from conftest import drawn_gradients, gradient_sums, lively  # noqa: E402
from drawn_models import LENGTH, draw  # noqa: E402

from jaxrl.models.config import ModelConfig  # noqa: E402
from jaxrl.models.families import FAMILIES  # noqa: E402
from jaxrl.models.loading import load_model  # noqa: E402
from jaxrl.models.safetensors import export_hf  # noqa: E402

with without_our_folder():
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    for each in FAMILIES.values():
        getattr(transformers, each.architecture)

DATA = Path(__file__).parent / "data" / "drawn.npz"
RECORDED = 2  # of each family
MOST = 1e-9


class _Float64:
    """A module in which float32 is float64."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.float32 = self.float = module.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def in_float64(families: list[str]) -> None:
    """transformers computes norms, rope and the softmax in float32, by the names `torch.float32`, `torch.float` and
    `x.float()`: here these are float64, for the rest of the process."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    exact = _Float64(torch)
    files = ["modeling_rope_utils", *(f"models.{family}.modeling_{family}" for family in families)]
    for file in files:
        importlib.import_module(f"transformers.{file}").torch = exact


def load(folder: Path) -> Any:
    """A folder's model, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )


def logits_and_gradients(model: Any, tokens: np.ndarray, cotangent: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Logits [B, T, V], and by the names in files the gradients of the sum of log-softmax times `cotangent`."""
    model.zero_grad()
    logits = model(torch.tensor(tokens)).logits
    (torch.log_softmax(logits, -1) * torch.tensor(cotangent)).sum().backward()
    found = {}
    for name, weight in model.named_parameters():
        found[name] = np.zeros(weight.shape) if weight.grad is None else weight.grad.numpy()
    return logits.detach().numpy(), found


def compare(family: str, seed: int) -> tuple[float, float, dict[str, Any]]:
    """The largest differences of logits and of gradients, over the largest of each; and what is recorded."""
    content = draw(family, seed)
    config = ModelConfig.from_hf(content)
    params, tokens, cotangent = lively(config, np.float64), *_inputs(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_hf(params, config, folder, dtype=np.float64, max_file_bytes=20_000)
        again, reread = load_model(folder, dtype=np.float64)
        assert again == config, (again, config)
        jax.tree.map(np.testing.assert_array_equal, reread, params)
        exported, _ = logits_and_gradients(load(folder), tokens, cotangent)
        (folder / "config.json").write_text(json.dumps(content))
        logits, gradients = logits_and_gradients(load(folder), tokens, cotangent)
        np.testing.assert_allclose(exported, logits, rtol=0, atol=1e-12)
        theirs = _in_our_form(gradients, folder)
    ours = drawn_gradients(params, tokens, cotangent, config)
    off = _relative(ours[0], logits)
    worst = max(map(_relative, jax.tree.leaves(ours[1]), jax.tree.leaves(theirs)))
    return off, worst, {"config": json.dumps(content), "logits": logits[:, ::8], "sums": gradient_sums(theirs)}


def _inputs(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    tokens = random.integers(0, config.vocab_size, (2, LENGTH))
    return tokens, random.normal(size=(*tokens.shape, config.vocab_size))


def _in_our_form(gradients: dict[str, np.ndarray], folder: Path) -> Any:
    """Gradients by their names in files as a tree like the params, read as weights are."""
    for file in folder.glob("*.safetensors"):
        names = load_file(file)
        save_file({name: np.ascontiguousarray(_of_file(gradients, name)) for name in names}, file, {"format": "pt"})
    return load_model(folder, dtype=np.float64)[1]


def _of_file(gradients: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The gradient of a file's tensor: transformers computes with all experts of a layer in one."""
    at = name.replace("block_sparse_moe.gate.", "mlp.gate.").replace("router.layer.", "router.")
    found = re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
    if found is None:
        at = re.sub(r"block_sparse_moe\.input_linear.weight", "block_sparse_moe.experts.gate_up_proj", at)
        at = re.sub(r"block_sparse_moe\.output_linear.weight", "block_sparse_moe.experts.down_proj", at)
        return gradients[at]
    layer, expert, matrix = found.groups()
    if matrix in ("down_proj", "w2"):
        return gradients[f"{layer}.mlp.experts.down_proj"][int(expert)]
    both = gradients[f"{layer}.mlp.experts.gate_up_proj"][int(expert)]
    return np.split(both, 2)[matrix in ("up_proj", "w3")]


def _relative(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - b).max() / max(np.abs(b).max(), 1e-3))


def _each(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    for family in [options.family] if options.family else FAMILIES:
        for seed in range(options.first, options.first + (RECORDED if options.record else options.count)):
            yield family, seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    in_float64([family.removesuffix("_text") for family in FAMILIES])
    recorded, worst, wrong = {}, (0.0, 0.0), []
    for number, (family, seed) in enumerate(_each(options), start=1):
        *off, kept = compare(family, seed)
        if not max(off) < MOST:
            wrong.append(f"{family} {seed}")
            print(f"{family} {seed}: logits {off[0]:.1e}, gradients {off[1]:.1e}: {kept['config']}")
        worst = tuple(map(max, worst, off))
        recorded |= {f"{family} {seed} {name}": value for name, value in kept.items()}
        if number % 20 == 0:
            jax.clear_caches()  # a process has room for the code of some thousand programs
            print(f"{number} models, largest differences: logits {worst[0]:.1e}, gradients {worst[1]:.1e}", flush=True)
    print(f"{number} models, largest differences: logits {worst[0]:.1e}, gradients {worst[1]:.1e}")
    if options.record:
        np.savez_compressed(DATA, **recorded)
    if wrong:
        sys.exit(f"{len(wrong)} differ by more than {MOST:g}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
