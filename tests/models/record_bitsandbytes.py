"""Writes data/bitsandbytes.npz: a matrix as bitsandbytes quantises it, on CPU.

    python tests/models/record_bitsandbytes.py

Needs torch and bitsandbytes.
"""

from pathlib import Path

import numpy as np
import torch
from bitsandbytes import functional

DATA = Path(__file__).parent / "data"

if __name__ == "__main__":
    matrix = np.random.default_rng(0).normal(size=(24, 128)).astype(np.float32)
    matrix[3, 64:] = 0  # a block of zeros
    given = torch.tensor(matrix)
    codes, state = functional.quantize_4bit(given, blocksize=64, quant_type="nf4")
    rows, magnitudes, _ = functional.int8_vectorwise_quant(given)
    np.savez_compressed(
        DATA / "bitsandbytes.npz",
        matrix=matrix,
        values=state.code.numpy(),
        nf4_codes=codes.numpy().reshape(24, 64),
        nf4_magnitudes=state.absmax.numpy().reshape(24, 2),
        nf4=functional.dequantize_4bit(codes, state).numpy(),
        int8_codes=rows.numpy(),
        int8_magnitudes=magnitudes.numpy().reshape(24, 1),
        int8=functional.int8_vectorwise_dequant(rows, magnitudes).numpy(),
    )
