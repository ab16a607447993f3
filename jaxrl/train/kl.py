"""Estimates of KL(policy || reference) per token, for the loss (jax arrays) and for the reward (numpy arrays).

Source: Schulman 2020, "Approximating KL Divergence": `kl` is k1, `mse` k2, `low_var_kl` k3. Conventions follow verl's
`kl_penalty`: `abs` is k1's absolute value; k3 takes the log-ratio clamped to ±20 and is clamped to ±10.
"""

from __future__ import annotations

from typing import Any


def kl_estimate(logprobs: Any, ref_logprobs: Any, kind: str) -> Any:
    """Of arrays of any one shape, in their dtype and by their own library.

    Raises:
      ValueError: for an unknown kind.
    """
    diff = logprobs - ref_logprobs
    match kind:
        case "kl":
            return diff
        case "abs":
            return abs(diff)
        case "mse":
            return 0.5 * diff**2
        case "low_var_kl":
            library = diff.__array_namespace__()
            back = library.clip(-diff, -20.0, 20.0)
            return library.clip(library.exp(back) - back - 1.0, -10.0, 10.0)
        case _:
            raise ValueError(
                "actor.kl_loss_type and algorithm.kl_penalty must be kl, abs, mse or low_var_kl, found " + repr(kind)
            )
