"""Writes data/trl.npz: masks, losses and gradients of TRL's SFTTrainer and DPOTrainer, on a tiny model in float32.

    python tests/training/record_trl.py

Needs torch, transformers and trl (1.16.0). Model and tokenizer are ours, written as users export them; the chat
template has the marks that `assistant_only_loss` reads.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import numpy as np  # noqa: E402
from beside import without_our_folder  # noqa: E402
from preference_rows import CONVERSATIONS, LOSSES, PAIRS, marked_template, moved, written_model  # noqa: E402

from jaxrl.models.safetensors import export_hf  # noqa: E402

with without_our_folder():
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

DATA = Path(__file__).parent / "data" / "trl.npz"
KEPT = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")


def gradients_of(model: torch.nn.Module, name: str) -> dict[str, np.ndarray]:
    return {f"{name}/{each}": dict(model.named_parameters())[each].grad.numpy() for each in KEPT}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, model_config, params = written_model(Path(folder) / "base")
        export_hf(params, model_config, path, dtype=np.float32)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.chat_template = marked_template()
        common = {
            "output_dir": f"{folder}/out",
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": len(CONVERSATIONS),
            "report_to": "none",
            "gradient_checkpointing": False,
            "max_length": 512,
            "disable_tqdm": True,
            "train_sampling_strategy": "sequential",
        }
        found: dict[str, np.ndarray] = {}

        def load() -> torch.nn.Module:
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

        for packing in (False, True):
            model = load()
            options = SFTConfig(**common, assistant_only_loss=True, packing=packing, padding_free=packing)
            data = Dataset.from_list([{"messages": list(each)} for each in CONVERSATIONS])
            trainer = SFTTrainer(model, args=options, train_dataset=data, processing_class=tokenizer)
            (batch,) = trainer.get_train_dataloader()
            loss = trainer.compute_loss(model, batch)
            loss.backward()
            print("packing", packing, batch["input_ids"].shape, loss.item())
            name = "packed" if packing else "sft"
            found |= gradients_of(model, name) | {f"{name}/loss": loss.detach().numpy()}
            if not packing:
                found["sft/tokens"] = batch["input_ids"].numpy()
                found["sft/labels"] = batch["labels"].numpy()

        for name, options in LOSSES.items():
            model, reference = load(), load()
            moved_params = moved(params)
            export_hf(moved_params, model_config, Path(folder) / "moved", dtype=np.float32)
            model.load_state_dict(
                AutoModelForCausalLM.from_pretrained(Path(folder) / "moved", dtype=torch.float32).state_dict()
            )
            args = DPOConfig(**common, **options)
            trainer = DPOTrainer(
                model,
                ref_model=reference,
                args=args,
                train_dataset=Dataset.from_list(list(PAIRS)),
                processing_class=tokenizer,
            )
            (batch,) = trainer.get_train_dataloader()
            loss = trainer.compute_loss(model, batch)
            loss.backward()
            found |= gradients_of(model, name) | {f"{name}/loss": loss.detach().numpy()}
            measured = trainer._metrics["train"] | trainer._metrics["eval"]
            metrics = {key: values[-1] for key, values in measured.items()}
            found[f"{name}/metrics"] = np.array(json.dumps(metrics))
            found[f"{name}/tokens"] = batch["input_ids"].numpy()
            found[f"{name}/mask"] = batch["completion_mask"].numpy()
            print(name, loss.item(), metrics)
    np.savez_compressed(DATA, **found)


if __name__ == "__main__":
    main()
