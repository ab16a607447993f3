"""The training steps of `jaxrl sft` and `jaxrl dpo`. numpy only, no jax.

A `Method` turns rows into a minibatch for a trainer with the likelihood objective (`jaxrl.training.objectives`). Both
methods have

- `examples`: conversations of a row; `read`: the rows of files;
- `explained`: what is learnt, and compared with what, for `jaxrl explain-config`;
- `trained`: the trainer's configuration, from one as the command reads it;
- `precomputes`: whether `reference` is called for all rows before the first step. It returns what the updates need of
  the weights that a run begins with, float64, a line for each row, which is passed to them as `known`;
- `train_step`: metrics of one update; `evaluate`: of held-out rows, and their weight in a mean over batches.

Source of the losses of pairs: DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing as its authors'
conservative DPO), robust DPO (Chowdhury et al. 2024, arXiv:2403.00409, eq. 12), and IPO (Azar et al. 2024,
arXiv:2310.12036, eq. 17). As in TRL, IPO takes means over a response's tokens where DPO takes sums, and robust DPO is
as TRL has it. Names of metrics are TRL's.

A pair's loss is a function of one number h, the difference of the two log-ratios to the reference. So its gradient is
dL/dh times the gradients of the two log-likelihoods, and each response's tokens have one weight in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.config import Config
from jaxrl.config.updates import DpoSection
from jaxrl.data.conversations import ConversationTokens, ExampleRow, ExampleRows, read_demonstrations, read_pairs
from jaxrl.training.training_step import Trainer
from jaxrl.types import ENVIRONMENT, Group, Prompt, Sample, SampleKey, TrainBatch


def batch_of(rows: Sequence[tuple[int, ExampleRow]]) -> TrainBatch:
    """The examples of rows, each with its number. A row's examples are the samples of one prompt, whose key begins with
    the row's place in the batch: a row may be there twice where an epoch ends."""
    groups: list[Group] = []
    for place, (number, row) in enumerate(rows):
        samples: list[Sample] = []
        for index, example in enumerate(row.examples):
            unknown = np.zeros(len(example.response), np.float32)
            versions = np.where(example.is_said, 0, ENVIRONMENT).astype(np.int32)
            samples.append(Sample(SampleKey(place, number, index), example.response, unknown, unknown, versions))
        groups.append(Group(Prompt(place, number, tuple(row.examples[0].prompt.tolist()), "", ""), samples))
    batch = TrainBatch.of(groups)
    batch.loss_masks = [sample.drawn.astype(np.float32) for sample in batch.samples]
    return batch


class Demonstrations:
    """Supervised fine-tuning: the negative log-likelihood of what the assistant has said."""

    examples, precomputes = 1, False

    def __init__(self, config: Config) -> None:
        self.explained = f"learnt: what the assistant says, sft.train_on={config.sft.train_on}"

    def trained(self, config: Config) -> Config:
        return config

    def read(self, names: Sequence[str], option: str, config: Config, tokens: ConversationTokens) -> ExampleRows:
        return read_demonstrations(names, option, config, tokens)

    def reference(self, trainer: Trainer, batch: TrainBatch) -> np.ndarray:
        raise AssertionError("nothing is compared")

    def train_step(self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None) -> dict[str, float]:
        batch.advantages = [np.ones(len(sample), np.float32) for sample in batch.samples]
        return trainer.train_step(batch)

    def evaluate(
        self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None
    ) -> tuple[dict[str, float], float]:
        """The mean over tokens, for every `algorithm.loss_agg_mode`."""
        logps, lengths = _sequence_logps(trainer.token_logprobs(batch, "actor"), batch)
        return {"loss": float(-logps.sum() / lengths.sum())}, float(lengths.sum())


@dataclass(frozen=True, slots=True)
class Pairs:
    """N pairs of responses; arrays are float64 [N, 2], the preferred response first."""

    logps: np.ndarray  # log-likelihoods under the policy, summed over tokens
    ref_logps: np.ndarray  # under the reference
    lengths: np.ndarray  # tokens with loss mask 1


class Preferences:
    """Direct preference optimization, of pairs."""

    examples = 2

    def __init__(self, config: Config) -> None:
        self._options = config.dpo
        self._of_base = config.model.has_adapters  # which is there without a copy

    @property
    def explained(self) -> str:
        dpo, known = self._options, ", asked of all pairs before the first step" if self.precomputes else ""
        own = "the weights that the run begins with" if self.precomputes else "a copy of the run's first weights"
        reference = ("the base without its adapters" if self._of_base else own) + known
        return f"learnt: what was preferred, dpo.loss_type={dpo.loss_type}, beta {dpo.beta:g}; reference: {reference}"

    @property
    def precomputes(self) -> bool:
        return self._options.precompute_ref_log_probs

    def trained(self, config: Config) -> Config:
        """A reference is kept as for a KL loss; the loss of a pair is a sum over tokens, and the batch's a mean."""
        resident = self._of_base or not self.precomputes
        algorithm = config.algorithm.replace(loss_agg_mode="seq-mean-token-sum")
        return config.replace(actor=config.actor.replace(use_kl_loss=resident), algorithm=algorithm)

    def read(self, names: Sequence[str], option: str, config: Config, tokens: ConversationTokens) -> ExampleRows:
        return read_pairs(names, option, config, tokens)

    def reference(self, trainer: Trainer, batch: TrainBatch) -> np.ndarray:
        """The log-likelihoods of both responses, [N, 2]. Without adapters the policy still is the reference."""
        which = "ref" if self._of_base else "actor"
        return _sequence_logps(trainer.token_logprobs(batch, which), batch)[0].reshape(-1, 2)

    def train_step(self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None) -> dict[str, float]:
        pairs = self._pairs(trainer, batch, known)
        losses, weights = preference_losses(pairs, self._options)
        each = 2.0 * weights.ravel()  # the mean is over pairs, and a minibatch's sum is divided by its samples
        batch.advantages = [np.full(len(s), w, np.float32) for s, w in zip(batch.samples, each, strict=True)]
        measured = preference_metrics(pairs, losses, self._options)
        return trainer.train_step(batch) | {"train/loss": measured.pop("loss")} | measured

    def evaluate(
        self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None
    ) -> tuple[dict[str, float], float]:
        pairs = self._pairs(trainer, batch, known)
        losses, _ = preference_losses(pairs, self._options)
        return preference_metrics(pairs, losses, self._options), float(len(losses))

    def _pairs(self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None) -> Pairs:
        own, lengths = _sequence_logps(trainer.token_logprobs(batch, "actor"), batch)
        if known is None:
            known, _ = _sequence_logps(trainer.token_logprobs(batch, "ref"), batch)
        return Pairs(own.reshape(-1, 2), known.reshape(-1, 2), lengths.reshape(-1, 2))


Method = Demonstrations | Preferences


def preference_losses(pairs: Pairs, options: DpoSection) -> tuple[np.ndarray, np.ndarray]:
    """(losses [N], weights [N, 2]): the loss of each pair, and the weight of each response's tokens in its gradient.

    -Σ weights · (log-likelihoods per token) has the gradient of the loss.
    """
    ratios = pairs.logps - pairs.ref_logps
    if options.loss_type == "ipo":
        per_token = 1.0 / pairs.lengths
        distance = (ratios * per_token) @ [1.0, -1.0] - 1.0 / (2.0 * options.beta)
        return distance**2, 2.0 * distance[:, None] * per_token * [-1.0, 1.0]
    h, smoothing = options.beta * (ratios @ [1.0, -1.0]), options.label_smoothing
    right, wrong = 1.0 - smoothing, smoothing
    if options.loss_type == "robust":
        right, wrong = right / (1.0 - 2.0 * smoothing), -wrong / (1.0 - 2.0 * smoothing)
    losses = right * np.logaddexp(0.0, -h) + wrong * np.logaddexp(0.0, h)
    doubt = np.exp(-np.logaddexp(0.0, h))  # that the preferred response is the better one
    slope = wrong * (1.0 - doubt) - right * doubt  # of the loss, by h
    return losses, options.beta * slope[:, None] * [-1.0, 1.0]


def preference_metrics(pairs: Pairs, losses: np.ndarray, options: DpoSection) -> dict[str, float]:
    """Means over pairs. `rewards/*` are the implicit rewards, beta times the log-ratios; `rewards/accuracies` the share
    of pairs of which the preferred response has the higher one."""
    rewards = options.beta * (pairs.logps - pairs.ref_logps)
    chosen, rejected = rewards.mean(axis=0)
    return {
        "loss": float(losses.mean()),
        "rewards/chosen": float(chosen),
        "rewards/rejected": float(rejected),
        "rewards/margins": float(chosen - rejected),
        "rewards/accuracies": float((rewards[:, 0] > rewards[:, 1]).mean()),
        "logps/chosen": float(pairs.logps[:, 0].mean()),
        "logps/rejected": float(pairs.logps[:, 1].mean()),
    }


def _sequence_logps(logprobs: Sequence[np.ndarray], batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """float64 per sample: the sum of the log-probabilities of what was said, and the number of those tokens."""
    said = [sample.drawn for sample in batch.samples]
    sums = [each[own].sum(dtype=np.float64) for each, own in zip(logprobs, said, strict=True)]
    return np.array(sums), np.array([own.sum() for own in said], np.float64)
