"""A report says what the telemetry says, to the number, and takes whatever state that is in."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import jsonschema
import pytest

from fsdp_ckpt.cli import main
from fsdp_ckpt.cli.schema import read_schema
from fsdp_ckpt.report.digest import digest
from fsdp_ckpt.report.figures import figures_of, timelines_of
from fsdp_ckpt.report.page import NARROW, WIDE, to_html
from fsdp_ckpt.report.reading import read_telemetry
from fsdp_ckpt.report.run import Run, Save
from fsdp_ckpt.report.scene import DARK, LIGHT, Scene, Text, to_svg, width_of
from fsdp_ckpt.report.units import BYTES, COUNT, SECONDS, make_axis
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from tests.told_runs import BEGUN_S, SHARD_BYTES, Told, tell_run

Capture = pytest.CaptureFixture[str]


def run_of(root: Path) -> Run:
    return digest(read_telemetry(LocalStore(str(root))))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tell_run(LocalStore(str(folder)))
    return folder


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    return run_of(root)


@pytest.fixture(scope="module")
def large_run() -> Run:
    """One save of a thousand ranks, of which rank 417 is slow to write."""
    store = open_store("memory://test-report-large/run")
    told = Told(store, 0, 1000, 0.0)
    told.save(500, 10.0, slow={417: 30.0})
    told.end(100.0, step=500)
    return digest(read_telemetry(store))


def objects(root: Path) -> list[Path]:
    return sorted(root.glob("telemetry/*/rank-*.jsonl"))


# --- numbers ---


def test_saves_are_told_from_all_ranks(run: Run) -> None:
    """Outcome, stall of the slowest rank, bytes of all, rate while any wrote."""
    saves = run.saves
    assert [(s.step, s.outcome) for s in saves[:7]] == [
        (100, "committed"),
        (200, "committed"),
        (300, "committed"),
        (400, "unknown"),
        (400, "committed"),
        (500, "failed"),
        (600, "committed"),
    ]
    save = saves[2]
    assert len(save.ranks) == 8
    assert save.begun_s == BEGUN_S + 602.0
    assert save.stall_s == max(rank.stall_s or 0.0 for rank in save.ranks)
    assert 2.4 < save.stall_s < 2.7
    assert save.num_bytes == 8 * SHARD_BYTES
    begin, end = save.ranks[3].spans["persist"]
    assert save.rate == pytest.approx(8 * SHARD_BYTES / (end - begin), rel=1e-6)
    assert save.total_s == pytest.approx(end + 0.3 - save.begun_s, abs=1e-3)
    assert save.overlap == pytest.approx(1 - save.stall_s / save.total_s)
    assert saves[5].error is not None
    assert "no space left" in saves[5].error


def test_the_straggler_is_named_with_its_phase(run: Run, large_run: Run) -> None:
    """Where a rank was clearly behind the others, and nowhere else."""
    saves = run.saves
    assert saves[0].straggler is None
    late = saves[2].straggler
    assert late is not None
    assert (late.rank, late.phase) == (3, "persist")
    assert late.behind_s == pytest.approx(25.0, abs=2.5)
    (save,) = large_run.saves
    assert save.straggler is not None
    assert save.straggler.rank == 417


def test_lost_time_adds_up(run: Run) -> None:
    """Stalls, restores, and the steps made again since the job died and since it went back."""
    losses = run.losses
    # The last that the first start told is step 430 at 862 s; step 300 was reached at 602 s. The second went
    # back from step 700 to 600, which it had reached at 1615 s, at 1815 s. Stalls there are counted as such.
    own_stalls = [run.saves[n].ranks[0].stall_s or 0.0 for n in (2, 6)]
    redone_s = (862.0 - 602.0) + (1815.0 - 1615.0) - sum(own_stalls)
    assert losses.redone_s == pytest.approx(redone_s, abs=0.01)
    assert losses.restore_s == pytest.approx(9.0)
    assert losses.stall_s == pytest.approx(sum(s.stall_s for s in run.saves))
    first, second = run.lives
    assert losses.running_s == pytest.approx(
        first.ended_s - first.begun_s + second.ended_s - second.begun_s
    )
    assert losses.stopped_s == pytest.approx(second.begun_s - first.ended_s)
    assert losses.lost_fraction == pytest.approx(losses.lost_s / losses.running_s)
    assert (first.has_ended, second.has_ended) == (False, True)


def test_what_went_wrong_is_listed_once(run: Run) -> None:
    """However many ranks told it."""
    kinds = [(i.kind, i.step, i.to_step) for i in run.incidents]
    assert kinds == [
        ("job died", 430, None),
        ("save failed", 500, None),
        ("spike", 700, None),
        ("rollback", 700, 600),
    ]


def test_storage_grows_by_commits_and_shrinks_by_deletions(run: Run) -> None:
    """One deletion, of the first checkpoint."""
    sizes = [size // (8 * SHARD_BYTES) for _, size in run.growth]
    assert sizes == [1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_clocks_are_put_on_one_axis(tmp_path: Path) -> None:
    """A rank an hour ahead is where it was, and the report says that it was put right."""
    told = Told(LocalStore(str(tmp_path)), 0, 2, 0.0, ahead_s={1: 3600.0})
    told.save(5, 10.0)
    told.end(60.0, step=5)
    run = run_of(tmp_path)
    (save,) = run.saves
    assert save.ranks[1].begun_s == pytest.approx(save.ranks[0].begun_s, abs=1e-3)
    assert any("+3600.000 s (rank 1)" in note for note in run.notes)


def test_ranks_of_one_host_have_one_clock(tmp_path: Path) -> None:
    """An answer that took long is no offset."""
    told = Told(LocalStore(str(tmp_path)), 0, 2, 0.0, host="node-7")
    told.save(5, 10.0)
    told.end(60.0, step=5)
    for path in objects(tmp_path):
        text = path.read_text()
        path.write_text(text.replace('"clock_ahead_s":0.0', '"clock_ahead_s":3.0'))
    run = run_of(tmp_path)
    (save,) = run.saves
    assert save.ranks[1].begun_s == save.ranks[0].begun_s == BEGUN_S + 10.0
    assert run.notes == ()


def test_lazy_copies_stall_by_what_steps_wait(tmp_path: Path) -> None:
    """What the optimizer waited for belongs to the save before it."""
    told = Told(LocalStore(str(tmp_path)), 0, 2, 0.0)
    told.save(5, 10.0)
    told.one(1, "save.held", 13.0, 4.0)
    told.end(60.0, step=5)
    (save,) = run_of(tmp_path).saves
    assert save.stall_s == pytest.approx(max(r.stall_s or 0.0 for r in save.ranks) + 4.0)


# --- telemetry in any state ---


def test_no_telemetry_is_one_line_with_a_remedy(tmp_path: Path, capsys: Capture) -> None:
    """On stderr; an absent root too."""
    for root in (tmp_path, tmp_path / "nowhere"):
        assert main(["report", str(root)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert "telemetry=TelemetryOptions()" in captured.err


def test_a_cut_line_costs_that_line(tmp_path: Path) -> None:
    """And is noted."""
    tell_run(LocalStore(str(tmp_path)), 2)
    whole = run_of(tmp_path)
    path = objects(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-20])
    run = run_of(tmp_path)
    assert [s.step for s in run.saves] == [s.step for s in whole.saves]
    assert any("1 × line that was cut" in note for note in run.notes)
    assert to_html(run).count("line that was cut") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff" * 100,
        b"[]\n[]\n",
        b'{"format":"fsdp_ckpt.telemetry","version":1}\n',
        b'{"format":"fsdp_ckpt.telemetry","version":1,"rank":"x","world_size":2}\n{}\n',
        b'{"format":"fsdp_ckpt.telemetry","version":"1","rank":0,"world_size":2}\n',
        b"{" * 100_000,
    ],
)
def test_an_object_of_anything_is_noted(tmp_path: Path, content: bytes) -> None:
    """The other ranks are reported as ever."""
    tell_run(LocalStore(str(tmp_path)), 2)
    objects(tmp_path)[1].write_bytes(content)
    run = run_of(tmp_path)
    assert len(run.committed) == 11
    assert any("without a readable first line" in note for note in run.notes)
    assert any("nothing from rank 1 of 2" in note for note in run.notes)
    to_html(run)


@pytest.mark.parametrize(
    "line",
    [
        b"7",
        b'{"n":1}',
        b'{"n":1,"name":"save.copy","rank":0,"wall_s":"now","monotonic_s":1}',
        b'{"n":1,"name":"save.copy","rank":-1,"wall_s":1,"monotonic_s":1}',
        b'{"n":1,"name":"save.copy","rank":0,"wall_s":1e300,"monotonic_s":1}',
        b'{"n":1,"name":"save.copy","rank":0,"wall_s":1,"monotonic_s":1,"step":"one"}',
        b'{"n":[],"name":"progress","rank":0,"wall_s":1,"monotonic_s":1,"step":1}',
        b'{"name":"progress","rank":0,"wall_s":1,"monotonic_s":1,"step":1}',
        b'{"n":7,"name":"of a later version","rank":0,"wall_s":1790000001,"monotonic_s":1,"new":{}}',
    ],
)
def test_a_line_of_anything_does_no_harm(tmp_path: Path, line: bytes) -> None:
    """Known events are reported; unknown ones are not in the way."""
    told = Told(LocalStore(str(tmp_path)), 0, 1, 0.0)
    told.save(5, 10.0)
    told.end(60.0, step=5)
    path = objects(tmp_path)[0]
    path.write_bytes(path.read_bytes() + line + b"\n")
    assert [s.step for s in run_of(tmp_path).committed] == [5]


def test_a_newer_version_is_noted(tmp_path: Path, capsys: Capture) -> None:
    """With what is old enough there is a report, without it an error that says upgrade."""
    tell_run(LocalStore(str(tmp_path)), 2)
    *others, last = objects(tmp_path)
    last.write_bytes(last.read_bytes().replace(b'"version":1', b'"version":2', 1))
    assert any("newer version; upgrade" in note for note in run_of(tmp_path).notes)
    for path in others:
        path.unlink()
    assert main(["report", str(tmp_path)]) == 1
    assert "upgrade" in capsys.readouterr().err


def test_a_start_without_saves_is_a_report(tmp_path: Path) -> None:
    """A run that has just begun."""
    told = Told(LocalStore(str(tmp_path)), 0, 1, 0.0)
    told.end()
    run = run_of(tmp_path)
    assert run.losses.lost_fraction == 0.0
    assert "of the time lost" in to_html(run)


# --- page and pictures ---


def scenes(run: Run) -> Iterator[tuple[str, Scene]]:
    for figure in (*figures_of(run), *timelines_of(run)):
        for width in (WIDE, NARROW):
            yield f"{figure.name} at {width:g}", figure.draw(width)


def box(text: Text) -> tuple[float, float, float, float]:
    width = width_of(text.text, text.size) * 0.93  # about as wide as it comes out
    left = text.x - {"start": 0.0, "middle": width / 2, "end": width}[text.anchor]
    return left, text.y - 0.75 * text.size, left + width, text.y + 0.2 * text.size


@pytest.mark.parametrize("kind", ["run", "large_run"])
def test_no_text_lies_on_another_or_outside(kind: str, request: pytest.FixtureRequest) -> None:
    """In any picture, at both widths."""
    for name, scene in scenes(request.getfixturevalue(kind)):
        texts = [item for item in scene.items if isinstance(item, Text)]
        for text in texts:
            left, top, right, bottom = box(text)
            assert left >= -1, (name, text)
            assert right <= scene.width + 1, (name, text)
            assert top >= 0, (name, text)
            assert bottom <= scene.height, (name, text)
        for one, other in combinations(texts, 2):
            a, b = box(one), box(other)
            is_apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert is_apart, (name, one.text, other.text)


def test_every_picture_is_well_formed_and_has_its_colours(run: Run) -> None:
    """SVG that any reader takes, with roles that the page's style knows."""
    assert LIGHT.keys() == DARK.keys()
    for name, scene in scenes(run):
        svg = ET.fromstring(to_svg(scene))
        for element in svg.iter():
            role = element.get("class")
            assert role is None or role[2:] in LIGHT, (name, role)
        assert svg.get("aria-label")


def test_a_thousand_ranks_are_a_few_lanes(large_run: Run) -> None:
    """The usual ranks, the latest ones, and a dot for each."""
    (figure,) = timelines_of(large_run)
    scene = figure.draw(WIDE)
    names = {item.text for item in scene.items if isinstance(item, Text)}
    assert {"median of 1000", "90th percentile", "rank 417"} <= names
    assert scene.height < 500
    assert "rank 417 was last" in figure.caption


class Links(HTMLParser):
    """Everything that a page could ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [v or "" for name, v in attrs if name in ("src", "href", "srcset", "data")]


def test_the_page_asks_for_nothing(run: Run) -> None:
    """No script, no address, no style from elsewhere."""
    page = to_html(run)
    links = Links()
    links.feed(page)
    assert links.found == ["data:,"]
    assert not links.tags & {"script", "img", "iframe", "object", "form"}
    assert "url(" not in page
    assert "@import" not in page


def test_what_a_run_says_of_itself_is_no_markup(tmp_path: Path) -> None:
    """Errors and names are text, whatever is in them."""
    told = Told(LocalStore(str(tmp_path)), 0, 3, 0.0)
    told.save(5, 10.0, error="<script>alert('&')</script>", slow={1: 20.0})
    told.end(60.0, step=5)
    page = to_html(run_of(tmp_path))
    assert "<script" not in page
    assert "&lt;script&gt;alert(" in page


def test_the_command_writes_page_pictures_and_json(tmp_path: Path, capsys: Capture) -> None:
    """And over what it wrote before."""
    pytest.importorskip("matplotlib")
    told = Told(LocalStore(str(tmp_path)), 0, 4, 0.0)
    told.steps(0, 20, 0.0, 1.0)
    told.save(20, 20.0, slow={3: 9.0})
    told.end(60.0, step=20)
    out, folder = tmp_path / "report.html", tmp_path / "pictures"
    out.write_text("an older one")
    command = ["report", str(tmp_path), "--out", str(out), "--png", str(folder), "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, read_schema("report"))
    assert out.read_text().startswith("<!doctype html>")
    pictures = sorted(folder.iterdir())
    names = ["progress", "rates", "save-20", "saves", "storage", "time"]
    assert [p.stem for p in pictures] == names
    assert all(p.read_bytes().startswith(b"\x89PNG\r\n") for p in pictures)
    assert sorted(document["written"]) == sorted([str(out), *map(str, pictures)])
    assert document["saves"][0]["straggler"]["rank"] == 3
    assert document["losses"]["lost_fraction"] == run_of(tmp_path).losses.lost_fraction
    fields = set(Save.__dataclass_fields__) | {"total_s", "overlap"}
    assert document["saves"][0].keys() == fields


def test_the_terminal_gets_the_numbers(root: Path, capsys: Capture) -> None:
    """The newest saves first, what went wrong, and notes."""
    assert main(["report", str(root)]) == 0
    out = capsys.readouterr().out
    assert "of the time lost" in out
    assert "4, +" in next(line for line in out.splitlines() if line.startswith("1200"))
    assert "save failed at step 500" in out


def test_pngs_without_matplotlib_are_one_line(
    root: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page needs none."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(root), "--out", str(tmp_path / "r.html")]) == 0
    capsys.readouterr()
    assert main(["report", str(root), "--png", str(tmp_path / "p")]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "fsdp-ckpt[report]" in captured.err


# --- units ---


@pytest.mark.parametrize(
    ("scale", "value", "text"),
    [
        (SECONDS, 0.0, "0 s"),
        (SECONDS, 0.0123, "12.3 ms"),
        (SECONDS, 59.99, "1 min"),
        (SECONDS, 90.0, "1.5 min"),
        (SECONDS, 200_000.0, "2.31 d"),
        (BYTES, 999_999.0, "1 MB"),
        (BYTES, 1_234_567_890.0, "1.23 GB"),
        (COUNT, 1200.0, "1200"),
        (COUNT, 123_456.0, "123\u202f456"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(scale: object, value: float, text: str) -> None:
    """As a reader expects them."""
    assert scale.text(value) == text  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("high", "scale", "name"),
    [(3000.0, SECONDS, "min"), (0.004, SECONDS, "ms"), (5e12, BYTES, "TB"), (7.0, COUNT, "")],
)
def test_ticks_are_round_and_inside(high: float, scale: object, name: str) -> None:
    """In one unit; few; the first is 0."""
    axis = make_axis(0.0, high, scale, 6)  # type: ignore[arg-type]
    assert axis.name == name
    assert 2 <= len(axis.ticks) <= 8
    assert axis.ticks[0] == (0.0, "0")
    assert all(0.0 <= value <= high * 1.0001 for value, _ in axis.ticks)
    assert len({text for _, text in axis.ticks}) == len(axis.ticks)
