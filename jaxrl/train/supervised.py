"""What a step of `jaxrl sft` and of `jaxrl dpo` does with its rows. Imports no jax.

A `Method` says how the options of a run are read for it, and turns rows into one update of a trainer whose objective is
`jaxrl.train.likelihood`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from jaxrl.config import Config
from jaxrl.data.conversations import ConversationTokens, ExampleRow, ExampleRows, read_demonstrations, read_pairs
from jaxrl.train.preferences import Pairs, preference_losses, preference_metrics
from jaxrl.types import ENVIRONMENT, Group, Prompt, Sample, SampleKey, TrainBatch


class Trainer(Protocol):
    """`jaxrl.train.step.Trainer`."""

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"]) -> list[np.ndarray]: ...

    def accumulate(self, batch: TrainBatch) -> None: ...

    def apply(self) -> dict[str, float]: ...


class Method(Protocol):
    """What is learnt from."""

    def trained(self, config: Config) -> Config:
        """The configuration for the trainer of `jaxrl.train.step`, from one as the command reads it."""
        ...

    def read(self, names: Sequence[str], option: str, config: Config, tokens: ConversationTokens) -> ExampleRows:
        """The rows of files."""
        ...

    @property
    def explained(self) -> str:
        """What is learnt, and compared with what, for `jaxrl explain-config`."""
        ...

    @property
    def examples(self) -> int:
        """Conversations of a row."""
        ...

    @property
    def precomputes(self) -> bool:
        """Whether `reference` is called for all rows, before the first step."""
        ...

    def reference(self, trainer: Trainer, batch: TrainBatch) -> np.ndarray:
        """What is to be known of rows under the weights that a run begins with: float64, a line for each row."""
        ...

    def learn(self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None) -> dict[str, float]:
        """One update; returns its metrics. `known`: of the rows, by `reference`."""
        ...

    def evaluate(
        self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None
    ) -> tuple[dict[str, float], float]:
        """Metrics of held-out rows, without `val/`, and by how much they count in a mean over batches."""
        ...


def batch_of(rows: Sequence[tuple[int, ExampleRow]]) -> TrainBatch:
    """The examples of rows, each with its number; of a row they are the samples of one prompt."""
    batch = TrainBatch.of([_group(place, number, row) for place, (number, row) in enumerate(rows)])
    batch.loss_masks = [sample.drawn.astype(np.float32) for sample in batch.samples]
    return batch


def _group(place: int, number: int, row: ExampleRow) -> Group:
    """`place`: in the batch, in which a row may be twice where an epoch ends."""
    prompt = Prompt(place, number, tuple(row.examples[0].prompt.tolist()), "", "")
    samples: list[Sample] = []
    for index, example in enumerate(row.examples):
        unknown = np.zeros(len(example.response), np.float32)
        versions = np.where(example.is_said, 0, ENVIRONMENT).astype(np.int32)
        samples.append(Sample(SampleKey(place, number, index), example.response, unknown, unknown, versions))
    return Group(prompt, samples)


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

    def learn(self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None) -> dict[str, float]:
        batch.advantages = [np.ones(len(sample), np.float32) for sample in batch.samples]
        trainer.accumulate(batch)
        return trainer.apply()

    def evaluate(
        self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None
    ) -> tuple[dict[str, float], float]:
        """The mean over tokens, whatever `algorithm.loss_agg_mode` is."""
        sums, lengths = _sums(trainer.token_logprobs(batch, "actor"), batch)
        return {"loss": float(-sums.sum() / lengths.sum())}, float(lengths.sum())


class Preferences:
    """Direct preference optimization, of pairs; see `jaxrl.train.preferences`."""

    examples = 2

    def __init__(self, config: Config) -> None:
        self._options = config.dpo
        self._of_base = config.model.has_adapters  # which is there without a copy

    @property
    def explained(self) -> str:
        dpo, known = self._options, ", asked of all pairs before the first step" if self.precomputes else ""
        own = "the weights that the run begins with" if self.precomputes else "a copy of the run's first weights"
        reference = (
            "none" if dpo.reference_free else ("the base without its adapters" if self._of_base else own) + known
        )
        return f"learnt: what was preferred, dpo.loss_type={dpo.loss_type}, beta {dpo.beta:g}; reference: {reference}"

    @property
    def precomputes(self) -> bool:
        return self._options.precompute_ref_log_probs

    def reference(self, trainer: Trainer, batch: TrainBatch) -> np.ndarray:
        """The log-likelihoods of both responses, [N, 2]. Without adapters the policy still is the reference."""
        which = "ref" if self._of_base else "actor"
        return _sums(trainer.token_logprobs(batch, which), batch)[0].reshape(-1, 2)

    def trained(self, config: Config) -> Config:
        """A reference is kept as for a KL loss; the loss of a pair is a sum over tokens, and the batch's a mean."""
        resident = not self._options.reference_free and (self._of_base or not self.precomputes)
        algorithm = replace(config.algorithm, loss_agg_mode="seq-mean-token-sum")
        return replace(config, actor=replace(config.actor, use_kl_loss=resident), algorithm=algorithm)

    def read(self, names: Sequence[str], option: str, config: Config, tokens: ConversationTokens) -> ExampleRows:
        return read_pairs(names, option, config, tokens)

    def learn(self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None) -> dict[str, float]:
        pairs = self._pairs(trainer, batch, known)
        losses, weights = preference_losses(pairs, self._options)
        each = 2.0 * weights.ravel()  # the mean is over pairs, and a minibatch's sum is divided by its samples
        batch.advantages = [np.full(len(s), w, np.float32) for s, w in zip(batch.samples, each, strict=True)]
        trainer.accumulate(batch)
        measured = preference_metrics(pairs, losses, self._options)
        return trainer.apply() | {"train/loss": measured.pop("loss")} | measured

    def evaluate(
        self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None = None
    ) -> tuple[dict[str, float], float]:
        pairs = self._pairs(trainer, batch, known)
        losses, _ = preference_losses(pairs, self._options)
        return preference_metrics(pairs, losses, self._options), float(len(losses))

    def _pairs(self, trainer: Trainer, batch: TrainBatch, known: np.ndarray | None) -> Pairs:
        own, lengths = _sums(trainer.token_logprobs(batch, "actor"), batch)
        if known is None:
            known = np.zeros_like(own)
            if not self._options.reference_free:
                known, _ = _sums(trainer.token_logprobs(batch, "ref"), batch)
        return Pairs(own.reshape(-1, 2), known.reshape(-1, 2), lengths.reshape(-1, 2))


def _sums(logprobs: Sequence[np.ndarray], batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """float64 per sample: the sum of the log-probabilities of what was said, and the number of those tokens."""
    said = [sample.drawn for sample in batch.samples]
    sums = [each[own].sum(dtype=np.float64) for each, own in zip(logprobs, said, strict=True)]
    return np.array(sums), np.array([own.sum() for own in said], np.float64)
