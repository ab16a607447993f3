"""Whole runs over turns: an environment whose answers follow from what is said, and a model that ends its turns."""

from pathlib import Path

from runs import Runs
from tiny import write_tiny_model

STEPS = 4
TALK = """
import hashlib, os, time
from jaxrl.environments.env import StepResult

class Talk:
    def __init__(self, index, notes="", scale=0.004):
        self.index, self.notes, self.scale, self.said = index, notes, scale, []

    def step(self, action):
        self.said.append(action.text)
        name = hashlib.sha256(repr((self.index, self.said)).encode()).hexdigest()[:16]
        number = int(name, 16)
        if self.notes:
            with open(self.notes, "a") as file:
                file.write(f"{len(repr(self.said))} {int(name[:8], 16)}\\\\n")
        time.sleep(number % 7 * self.scale)
        if number % 41 == 0:
            os._exit(1)
        done = number % 5 == 0 or len(self.said) == 4
        metrics = {"odd": number % 2, "name": int(name[:8], 16)}
        return StepResult(number % 3 / 2, done, "" if done else f"<{number % 100}>", metrics)
""".replace("\\\\n", "\\n")


def talking(folder: Path) -> Runs:
    """Runs whose model ends a turn with one token in thirty."""
    model = write_tiny_model(folder / "model", eos_token_id=[2, *range(4, 260, 43)])
    runs = Runs(folder, model)
    (folder / "talk.py").write_text(TALK)
    runs.config["environment"] = {
        "kind": "native",
        "path": str(folder / "talk.py"),
        "name": "Talk",
        "args": {"notes": str(folder / "notes")},
        "num_workers": 3,
    }
    runs.config["reward"] = {"kind": "environment"}
    runs.config["data"] |= {"max_response_length": 96}
    runs.config["rollout"] |= {"num_blocks": 90}
    runs.config["trainer"] |= {"total_training_steps": STEPS, "save_freq": 0}
    return runs
