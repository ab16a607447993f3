"""The checksum of a run's last weights."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path


def sha256_of(run_dir: Path, folder: Path) -> str:
    """Of the files that `jaxrl export` writes to the new `folder`, in float32."""
    words = [sys.executable, "-m", "jaxrl", "export", run_dir, folder, "--dtype", "float32"]
    subprocess.run(words, check=True, stdout=2)
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
