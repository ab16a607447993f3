"""A calibration file: constants of the simulator that were fitted to known facts about a machine or a workload.

`papers.calibrate` makes jaxrl's own, `docs/reproductions/calibration.json`, from facts that papers published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from jaxrl.sim.cost_model import Efficiency

VERSION = 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants by the problem that they were fitted to, and by name: `values[problem][constant]`."""

    values: Mapping[str, Mapping[str, float]]

    def of(self, problem: str) -> Mapping[str, float]:
        """The constants of a problem. Raises ValueError if there is no such problem."""
        if problem not in self.values:
            raise ValueError(f"calibration: no problem {problem!r}; there are {', '.join(sorted(self.values))}")
        return self.values[problem]

    def efficiency(self, problem: str) -> Efficiency:
        """The efficiency factors of a problem's machine; undetermined factors keep their defaults."""
        return efficiency_of(self.of(problem))

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Reads a file. Raises ValueError if it is missing, not JSON, or of another version."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such calibration file") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None
        version = document.get("version") if isinstance(document, dict) else None
        if version != VERSION:
            raise ValueError(f"{path}: calibration version {version!r} must be {VERSION}: calibrate again")
        values = {}
        for name, entry in document["problems"].items():
            constants = entry["held"] | entry["constants"]
            values[name] = {constant: found["value"] for constant, found in constants.items()}
        return cls(values)


def efficiency_of(values: Mapping[str, float]) -> Efficiency:
    """`Efficiency` from the constants named `efficiency.*`; the others keep their defaults."""
    return Efficiency(**{f.name: values[key] for f in fields(Efficiency) if (key := f"efficiency.{f.name}") in values})
