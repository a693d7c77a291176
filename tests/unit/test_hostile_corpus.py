"""Inputs that are, or once were, hard to refuse: each of the corpus again, and a short run of the fuzzer."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import fuzz
from scripts.fuzz_targets import CHECKS, run

INPUTS = fuzz.corpus()
ROUNDS = 700  # about five seconds


@pytest.mark.parametrize(
    ("target", "path"), INPUTS, ids=[f"{target}/{path.stem}" for target, path in INPUTS]
)
def test_inputs_of_the_corpus_are_read_or_refused(target: str, path: Path) -> None:
    """What was found once stays mended."""
    run(target, path.read_bytes())


def test_each_target_has_a_corpus() -> None:
    """A folder for each reader, and no other."""
    assert {target for target, _ in INPUTS} == set(CHECKS)


def test_a_short_run_finds_nothing() -> None:
    """Changed inputs, the same ones each time; `make fuzz` looks for others."""
    done = fuzz.fuzz(seed=4, rounds=ROUNDS)
    assert done.total() == ROUNDS
    assert set(done) == set(CHECKS)


def test_a_failure_is_told_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lets a foreign error through is found, and so is one that does not come back."""

    def break_down(content: bytes) -> None:
        raise ZeroDivisionError("as a reader that does not check")

    monkeypatch.setitem(CHECKS, "value", break_down)
    with pytest.raises(fuzz.FailureError, match="value") as caught:
        fuzz.fuzz(seed=4, rounds=100)
    assert type(caught.value.__cause__) is ZeroDivisionError
    assert caught.value.target == "value"
