"""How a configuration scores each domain, as rows of text for `jaxrl explain-config`."""

from __future__ import annotations

from jaxrl.config import Config
from jaxrl.config.domains import Domain, domains
from jaxrl.config.rewards import PartSection

HEAD = ("reward of", "scorer", "time limit", "at once", "weight")


def reward_rows(config: Config) -> list[tuple[str, ...]]:
    """A row of `HEAD` for each domain, that of sources without one last."""
    found = domains(config.reward)
    others = found.pop("")
    rows = [_row(domain, source, config) for source, domain in found.items()]
    return [HEAD, *rows, _row(others, "other sources" if rows else "all prompts", config)]


def part_lines(config: Config) -> list[str]:
    reward, longest = config.reward, config.data.max_response_length
    lines = [f"plus {part.weight:g} × {name}: {_part(part, longest)}" for name, part in reward.parts.items()]
    if reward.wrong_reward:
        lines.append(f"wrong answers: {reward.wrong_reward:g} on top, in training")
    overlong = reward.overlong_buffer
    if overlong.enable:
        lines.append(
            f"minus up to {overlong.penalty_factor:g} over the last {overlong.len:,} of {longest:,} tokens, in training"
        )
    return lines


def _row(domain: Domain, name: str, config: Config) -> tuple[str, ...]:
    weight, model = f"{domain.weight:g}", config.reward.model_of(domain.kind)
    if model is not None:
        return name, *model.explained(domain.kind), weight
    return name, _scorer(domain, config), _limit(domain, config), _at_once(config), weight


def _scorer(domain: Domain, config: Config) -> str:
    reward, task = config.reward, config.data.task
    match domain.kind:
        case "auto" if task:
            return f"auto: {task}" + (", math for files" if config.data.val_files else "")
        case "auto":
            return "auto: math"
        case "task":
            return f"task: {task}"
        case "code":
            return f"code: {'all tests' if reward.code.score == 'all' else 'share of tests'}"
        case "custom":
            return f"custom: {domain.name} of {domain.path}"
    return domain.kind


def _limit(domain: Domain, config: Config) -> str:
    code = config.reward.code
    found = [f"{domain.timeout_s:g} s a sample"] if domain.timeout_s else []
    if domain.kind == "code":
        least = min(code.min_timeout_s, code.max_timeout_s)
        adapts = code.timeout == "adaptive" and least < code.max_timeout_s
        found.append(f"{f'{least:g} to ' if adapts else ''}{code.max_timeout_s:g} s a test case")
    return ", ".join(found) or "none"


def _at_once(config: Config) -> str:
    reward = config.reward
    workers = reward.num_workers
    sharing = sum(each.place == "workers" or bool(reward.parts) for each in domains(reward).values())
    most = max(workers - sharing + 1, 1)
    return f"{most} of {workers} " + ("process" if workers == 1 else "processes")


def _part(part: PartSection, longest: int) -> str:
    match part.kind:
        case "format":
            return f"format, {part.pattern}"
        case "length":
            return f"length, from {part.free_tokens:,} to {longest:,} tokens"
        case "custom":
            return f"custom, {part.name} of {part.path}"
