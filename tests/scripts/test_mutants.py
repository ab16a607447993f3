"""What scripts/mutants.py draws from; the mutants themselves are Cosmic Ray's."""

import pytest
from mutants import AREAS, annotated, mutants
from sabotage import ROOT


def test_places_of_annotations_are_known() -> None:
    source = "x: int | None = 1 | 2\ndef f(a: int | str, b=1 | 2) -> int | None:\n    return a | b\n"
    assert sorted(annotated(source)) == [((1, 3), (1, 13)), ((2, 9), (2, 18)), ((2, 32), (2, 42))]


def test_areas_name_what_is_there() -> None:
    assert all((ROOT / path).exists() for paths, tests in AREAS.values() for path in (*paths, *tests))


def test_mutants_are_in_code_and_not_in_annotations() -> None:
    pytest.importorskip("cosmic_ray")
    file = "jaxrl/scheduling/rounds/busy_time.py"
    places = annotated((ROOT / file).read_text())
    found = list(mutants([file]))
    assert found
    assert not any(start <= each.start_pos < end for each in found for start, end in places)
