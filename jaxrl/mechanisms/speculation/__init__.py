"""History speculation: rows draft from the same prompt's earlier responses, and a step verifies several tokens.
`index.py` has a run's.

Source: RhymeRL §5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from jaxrl.scheduling.mechanism import Mechanism, RolloutMemory
from jaxrl.schema.declared import Cap
from jaxrl.schema.section import Section

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.mechanisms.speculation.index import SpeculationSession
    from jaxrl.mechanisms.speculation.proposer import Drafting
    from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule, StepCosts
    from jaxrl.report.charts import Chart
    from jaxrl.report.curves import PagePart
    from jaxrl.report.runs import RecordedRun
    from jaxrl.rollout.executor import MeshExecutor
    from jaxrl.rollout.remote import RemoteExecutor
    from jaxrl.run.run import Run
    from jaxrl.scheduling.layouts.latency_profile import Profile


class Speculation(Mechanism):
    """Keeps the responses of earlier rounds, and gives new requests indexes to draft from."""

    class Options(Section):
        """Drafts from a prompt's earlier responses, verified several tokens a step; the tokens stay the same."""

        enable: Annotated[bool, "Switch history speculation on."] = False
        epochs: Annotated[
            int,
            Ge(1),
            Cap(64, "every response of them is kept in memory"),
            "The number of a prompt's last rollouts to draft from.",
        ] = 1
        verify_tokens: Annotated[
            int,
            Ge(0),
            Cap(65536, "the activations of all of them exist at once"),
            "Drafted tokens that a step may verify, per dp group; its rows share them. 0: what suits the devices.",
        ] = 0
        max_batch: Annotated[
            int,
            Ge(0),
            "The most rows of a dp group with which a plan verifies drafts; 0: what rollout.layout.profile says of the "
            "present rate of acceptance, and without a profile as many as verify_tokens allows.",
        ] = 0
        max_bytes: Annotated[
            int, Ge(1), "Bytes of host memory for history and its indexes; the oldest responses go first."
        ] = 1 << 30
        num_indexes: Annotated[
            int,
            Ge(0),
            Cap(16384, "each has room for the longest history"),
            "Prompts whose history is on the devices at once, per dp group; 0: one for each row.",
        ] = 0

    name = "history"
    title = "history speculation"
    option = "rollout.speculation.enable"

    @classmethod
    def reads_profile(cls, config: Config) -> bool:
        """Whether plans verify by what `rollout.layout.profile` says."""
        spec = config.rollout.speculation
        return spec.enable and not spec.max_batch and bool(config.rollout.layout.profile)

    @classmethod
    def note(cls, config: Config) -> str | None:
        spec = config.rollout.speculation
        if spec.max_batch or config.rollout.layout.profile:
            return None
        return (
            "rollout.speculation: plans verify drafts wherever a step has room for them, whether or not that is "
            "faster; give rollout.layout.profile a file of `jaxrl profile`, or set rollout.speculation.max_batch"
        )

    @classmethod
    def rollout_memory(
        cls, config: Config, num_devices: int, platform: str, weight_bytes: int, is_timeless: bool
    ) -> RolloutMemory | None:
        drafting, spec, name = build_proposer(config, platform), config.rollout.speculation, "draft indexes"
        assert drafting is not None
        return RolloutMemory(
            name,
            {name: drafting.num_bytes(config.rollout.max_num_seqs)},
            f"rollout.speculation.num_indexes ({spec.num_indexes or config.rollout.max_num_seqs} per dp group) or "
            f"rollout.speculation.epochs ({spec.epochs})",
            positions=drafting.verify_tokens,
        )

    @classmethod
    def page_part(cls) -> PagePart:
        from jaxrl.report.curves import PagePart

        return PagePart(_charts)

    @classmethod
    def build(cls, run: Run) -> SpeculationSession | None:
        options, builder = run.config.rollout.speculation, None
        if not options.enable and not run.config.rollout.ranking_groups.enable:
            return None
        from jaxrl.mechanisms.speculation.index import DraftIndex, SpeculationSession, history_store

        if options.enable:
            run.executors.share(DraftIndex)
            builder = run.machine.index_builder()
            run.machine.on_close(builder.close)
        session = SpeculationSession(history_store(options), builder)
        run.history = session.store
        return session


def draft_config(config: Config, platform: str, costs: StepCosts | None = None) -> DraftConfig | None:
    """When plans verify drafts, by `rollout.speculation`; None: never. `platform`: of the rollout's devices; `costs`:
    what steps take, if that is known."""
    spec = config.rollout.speculation
    if not spec.enable:
        return None
    from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftWindow, default_verify_tokens

    return DraftConfig(DraftWindow(), spec.verify_tokens or default_verify_tokens(platform), spec.max_batch, costs)


def build_proposer(config: Config, platform: str) -> Drafting | None:
    """The drafting that an executor is built for; None where `rollout.speculation` is off."""
    drafts, spec = draft_config(config, platform), config.rollout.speculation
    if drafts is None:
        return None
    from jaxrl.mechanisms.speculation.proposer import Drafting

    num_responses = config.rollout.n * spec.epochs
    num_tokens = num_responses * config.data.max_response_length
    return Drafting(num_responses, num_tokens, drafts.verify_tokens, num_indexes=spec.num_indexes)


def verify_rule(
    config: Config,
    executor: MeshExecutor | RemoteExecutor,
    profile: Profile | None = None,
    row_sizes: Mapping[int, Sequence[int]] | None = None,
) -> Callable[[], DraftRule] | None:
    """Makes what says which plans of an executor verify; None where `rollout.speculation` is off. `profile`,
    `row_sizes`: as in `step_costs`, where the profile is read. Raises ConfigError as `step_costs` does."""
    costs = None
    if profile is not None and row_sizes is not None and Speculation.reads_profile(config):
        costs = step_costs(config, profile, executor, row_sizes)
    drafts = draft_config(config, executor.platform, costs)
    if drafts is None:
        return None
    from jaxrl.mechanisms.speculation.rule import DraftRule

    return partial(DraftRule, drafts)


def step_costs(
    config: Config, profile: Profile, executor: MeshExecutor | RemoteExecutor, row_sizes: Mapping[int, Sequence[int]]
) -> StepCosts:
    """The times of an executor's steps, in its layout at the time of the call. `profile`: nothing that is measured in
    the run changes what it says, so plans do not depend on a clock; `row_sizes`: row counts of programs, by degree.
    Raises ConfigError where the profile has no steps that verify drafts, or of other widths."""
    from jaxrl.config import ConfigError
    from jaxrl.mechanisms.speculation.rule import StepCosts
    from jaxrl.scheduling.layouts.latency import LatencyPredictor

    for tp in row_sizes:
        widths, measured = executor.verify_widths(tp), profile.verify_widths(tp)
        if widths != measured:
            raise ConfigError(
                f"rollout.layout.profile: {config.rollout.layout.profile} has steps at tp {tp} that verify "
                f"{measured or 'nothing'}, and rollout.speculation needs {widths} (drafted tokens of a row, by the "
                "number of rows): run `jaxrl profile` with the same rollout.speculation options, or set "
                "rollout.speculation.max_batch, which asks no profile"
            )
    predictor = LatencyPredictor(profile, config.rollout.layout, row_sizes)
    return StepCosts(
        lambda rows, context: predictor.decode_step_s(executor.tp, rows, context),
        lambda rows, context: predictor.verify_step_s(executor.tp, rows, context),
    )


def _charts(run: RecordedRun) -> list[Chart]:
    """Charts of speculation, with the steps at which an epoch begins; none where it is off."""
    from jaxrl.report.charts import Chart, Curve
    from jaxrl.report.curves import with_epochs

    if not run.series("rollout/spec/accept_rate"):
        return []
    shares = [
        Curve("accepted, of those drafted", run.series("rollout/spec/accept_rate")),
        Curve("of decoded tokens from drafts", run.series("rollout/spec/drafted_share"), "c2"),
        Curve("of plans that verify", run.series("rollout/spec/plans_share"), "c4"),
    ]
    tokens = [Curve("tokens", run.series("rollout/spec/tokens_per_step"))]
    of_drafts, of_tokens = "How often earlier responses foretell a new one.", "1 is decoding without drafts."
    charts = [
        Chart("Drafts from history", "share", shares, of_drafts, top=1),
        Chart("Tokens of a step that verifies", "per row", tokens, of_tokens),
    ]
    return [with_epochs(run, chart) for chart in charts]
