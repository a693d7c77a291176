"""``fsdp-ckpt interval``, ``prune`` and ``pin`` say what they do, in text or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_ckpt.cli import main
from fsdp_ckpt.cli.durations import duration_text, parse_duration
from fsdp_ckpt.commit.catalog import CheckpointInfo, find_checkpoints
from fsdp_ckpt.stability.interval import daly_interval, lost_fraction
from fsdp_ckpt.storage.local import LocalStore
from tests.roots import attempt_at, put_checkpoint, tree

Capture = pytest.CaptureFixture[str]
EXAMPLE = ["interval", "--cost", "6s", "--mtbf", "3h", "--ranks", "16384"]


def test_interval_as_json(capsys: Capture) -> None:
    """One document, in seconds; the interval loses less than those around it."""
    assert main([*EXAMPLE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["interval_s"] == daly_interval(6.0, 10800.0)
    assert document["lost_fraction"] == lost_fraction(document["interval_s"], 6.0, 10800.0)
    assert (document["young_interval_s"], document["mtbf_s"]) == (360.0, 10800.0)
    lost = [row["lost_fraction"] for row in document["intervals"]]
    assert min(lost) == lost[2] == document["lost_fraction"]
    sizes = {row["ranks"]: row["mtbf_s"] for row in document["sizes"]}
    assert sizes == {1024: 172800.0, 4096: 43200.0, 16384: 10800.0, 65536: 2700.0}
    (same,) = (row for row in document["sizes"] if row["ranks"] == 16384)
    assert same["lost_rank_hours_per_day"] == document["lost_fraction"] * 24 * 16384


def test_interval_as_text(capsys: Capture) -> None:
    """The answer first, then the tables; without ranks only one."""
    assert main(EXAMPLE) == 0
    text = capsys.readouterr().out
    assert text.startswith("save every 5.93 min: 3.30% of the time is lost on 16384 ranks")
    assert "RANKS  FAILURE EVERY" in text
    assert main(EXAMPLE[:5]) == 0
    assert "RANKS  FAILURE EVERY" not in capsys.readouterr().out


def test_the_mean_time_between_failures_is_the_jobs_unless_said(capsys: Capture) -> None:
    """Of one rank, it is divided by their number; recovery adds to what is lost."""
    arguments = ["interval", "--cost", "6s", "--mtbf", "2048d", "--per-rank", "--json"]
    assert main([*arguments, "--ranks", "16384"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mtbf_s"] == 10800.0
    assert main([*arguments, "--ranks", "16384", "--recovery", "5min"]) == 0
    assert json.loads(capsys.readouterr().out)["lost_fraction"] > document["lost_fraction"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert "--per-rank needs --ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6s", 6.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("90", 90.0),
        (" 5 min ", 300.0),
    ],
)
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    """A number without a unit is seconds."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-1s", "1y", "s", "1e3s", "1h30m", "9" * 400, "nan"])
def test_what_is_no_time_is_wrong_usage(text: str, capsys: Capture) -> None:
    """The message shows how to write it."""
    with pytest.raises(SystemExit) as caught:
        main(["interval", f"--cost={text}", "--mtbf", "3h"])
    assert caught.value.code == 2
    assert "write 6s" in capsys.readouterr().err


def test_times_are_shown_in_three_digits() -> None:
    """In the largest unit that they reach."""
    times = [0.25, 6.0, 356.01, 10800.0, 200000.0]
    assert [duration_text(t) for t in times] == ["250 ms", "6 s", "5.93 min", "3 h", "2.31 d"]


@pytest.fixture
def root(tmp_path: Path) -> LocalStore:
    """A root with three checkpoints and a torn one, all long ago."""
    store = LocalStore(str(tmp_path / "run"))
    for step in (10, 20, 30):
        put_checkpoint(store, step)
    put_checkpoint(store, 40, ranks=[1], publish=False)
    return store


def steps(root: LocalStore) -> list[int]:
    return [f.step for f in find_checkpoints(root) if isinstance(f, CheckpointInfo)]


def test_prune_says_first_what_it_would_do(root: LocalStore, capsys: Capture) -> None:
    """A dry run deletes nothing; the real one says and does the same."""
    before = tree(root)
    arguments = ["prune", root.url, "--last", "1", "--json"]
    assert main([*arguments, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert tree(root) == before
    assert main(arguments) == 0
    done = json.loads(capsys.readouterr().out)
    assert planned == {**done, "dry_run": True}
    assert [(d["step"], d["what"]) for d in done["delete"]] == [
        (10, "checkpoint"), (20, "checkpoint"), (40, "attempt"),
    ]  # fmt: skip
    assert [k["step"] for k in done["keep"]] == steps(root) == [30]


def test_prune_as_text(root: LocalStore, capsys: Capture) -> None:
    """One line each, with the reason, and how much it was."""
    assert main(["prune", root.url, "--last", "2", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "would delete checkpoint" in text
    assert "no rule keeps it" in text
    assert "one of the newest 2 good" in text
    assert text.splitlines()[-1].startswith("would delete 2 of 4")
    assert main(["prune", root.url, "--last", "2", "--grace", "99999d"]) == 0
    assert "deleted 1 of 3" in capsys.readouterr().out


def test_prune_takes_rules(root: LocalStore, capsys: Capture) -> None:
    """Each option is a rule; a metric without a number, and no rule at all, are wrong usage."""
    assert (
        main(["prune", root.url, "--last", "1", "--every-steps", "20", "--dry-run", "--json"]) == 0
    )
    assert [k["step"] for k in json.loads(capsys.readouterr().out)["keep"]] == [30, 20]
    for arguments in ([], ["--last", "1", "--best", "2"], ["--last", "1", "--metric", "loss"]):
        with pytest.raises(SystemExit) as caught:
            main(["prune", root.url, *arguments])
        assert caught.value.code == 2


def test_pruning_a_root_that_is_none_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    """A mistyped path is not a run without anything to delete."""
    assert main(["prune", str(tmp_path / "nowhere"), "--last", "1"]) == 1
    assert "no checkpoint here" in capsys.readouterr().err


def test_pin_and_unpin(root: LocalStore, capsys: Capture) -> None:
    """A pinned one survives a prune; unpinned, it goes."""
    assert main(["pin", root.url, "10", "--note", "paper"]) == 0
    assert capsys.readouterr().out == "step 10: pinned\n"
    assert main(["pin", root.url, "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["has_changed"] is False
    assert main(["prune", root.url, "--last", "1"]) == 0
    assert steps(root) == [30, 10]
    assert main(["pin", root.url, "10", "--unpin"]) == 0
    assert main(["pin", root.url, "10", "--unpin"]) == 0
    assert capsys.readouterr().out.endswith("step 10: not pinned\nstep 10: not pinned, as before\n")
    assert main(["prune", root.url, "--last", "1"]) == 0
    assert steps(root) == [30]


@pytest.mark.parametrize("step", ["40", "50"])
def test_pinning_what_is_not_there_is_an_error(
    root: LocalStore, step: str, capsys: Capture
) -> None:
    """One line, exit code 1, and nothing is left."""
    before = tree(root)
    for more in ([], ["--unpin"]):
        assert main(["pin", root.url, step, *more]) == 1
        assert capsys.readouterr().err.startswith("fsdp-ckpt: error: ")
    assert tree(root) == before
    assert attempt_at(40 / 3600) in root.child("step-000000040").list_folders()
