"""A report as one HTML file: no script, no network, light and dark, on paper and on a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fsdp_ckpt.report.figures import Figure, figures_of, timelines_of
from fsdp_ckpt.report.plot import clock_text
from fsdp_ckpt.report.run import Run, Save
from fsdp_ckpt.report.scene import DARK, LIGHT, to_svg
from fsdp_ckpt.report.summary import summary_of
from fsdp_ckpt.report.units import BYTES, RATE, SECONDS
from fsdp_ckpt.version import __version__

__all__ = ["to_html"]

WIDE, NARROW = 920.0, 340.0
MAX_ROWS = 200
# Timelines that are open without a click.
NUM_OPEN = 2

_STYLE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--band);color:var(--ink);line-height:1.5;
 font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main{max-width:1000px;margin:0 auto;padding:32px 16px 48px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:17px;margin:0}
p{margin:4px 0;color:var(--muted);font-size:14px;overflow-wrap:anywhere}
section,.tile{background:var(--paper);border:1px solid var(--grid);border-radius:10px}
section{padding:18px 20px;margin:16px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:20px 0}
.tile{padding:12px 14px}
.tile b{display:block;font-size:21px;line-height:1.3;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{font-size:12.5px;color:var(--muted)}
.tile.bad b{color:var(--bad)}
svg{display:block;max-width:100%;height:auto;margin-top:12px;font-variant-numeric:tabular-nums}
svg polyline,svg path{fill:none}
.narrow{display:none}
.narrow svg{width:100%;max-width:520px}
.scroll{overflow-x:auto;margin-top:10px}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--muted);white-space:nowrap}
th,td{text-align:right;padding:6px 10px;border-bottom:1px solid var(--grid);white-space:nowrap}
th.l,td.l{text-align:left}
td.t{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:180px}
td:first-child,th:first-child{padding-left:0}
td.bad{color:var(--bad);font-weight:600}
details{border-top:1px solid var(--grid);padding:10px 0}
details:first-of-type{border-top:0}
summary{cursor:pointer;font-weight:600;font-size:14px}
summary span{font-weight:400;color:var(--muted)}
ul{margin:8px 0 0;padding-left:20px;color:var(--muted);font-size:13.5px;overflow-wrap:anywhere}
footer{color:var(--muted);font-size:12.5px;text-align:center}
@media (max-width:700px){.wide{display:none}.narrow{display:block}main{padding:20px 8px}
 section{padding:14px 12px}h1{font-size:21px}.m{display:none}}
@media print{body{background:none}main{max-width:none;padding:0}section,.tile{break-inside:avoid}
 details:not([open]){display:none}}
"""


def to_html(run: Run) -> str:
    """Return the whole page."""
    body = "".join(_body(run))
    title = escape(f"Checkpoints of {run.root}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Nothing that a run says of itself can load or run anything.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        # Else a browser asks for /favicon.ico.
        f'<link rel="icon" href="data:,"><title>{title}</title>'
        f"<style>{_colours()}{_STYLE}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _colours() -> str:
    """Return the palette as variables, and a class per role for what is filled and what is drawn."""
    variables = {
        name: "".join(f"--{role}:{colour};" for role, colour in palette.items())
        for name, palette in (("light", LIGHT), ("dark", DARK))
    }
    classes = "".join(
        f".f-{role}{{fill:var(--{role})}}.s-{role}{{stroke:var(--{role})}}" for role in LIGHT
    )
    return (
        f":root{{color-scheme:light dark;{variables['light']}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{variables['dark']}}}}}"
        f"{classes}"
    )


def _body(run: Run) -> Iterator[str]:
    begun, ended = run.lives[0].begun_s, max(life.ended_s for life in run.lives)
    yield f"<h1>{escape(run.root)}</h1>"
    yield f"<p>{clock_text(begun)} to {clock_text(ended)} UTC, {SECONDS.text(ended - begun)}</p>"
    yield '<div class="tiles">'
    for number in summary_of(run):
        kind = " bad" if number.is_bad else ""
        yield f'<div class="tile{kind}"><b>{escape(number.value)}</b>'
        yield f"<span>{escape(number.name)}</span></div>"
    yield "</div>"
    if run.notes:
        yield '<section class="notes"><h2>Notes</h2><ul>'
        yield "".join(f"<li>{escape(note)}</li>" for note in run.notes[:50])
        yield "</ul></section>"
    for figure in figures_of(run):
        yield f'<section id="{figure.name}"><h2>{escape(figure.title)}</h2>'
        yield f"<p>{escape(figure.caption)}</p>{_picture(figure)}</section>"
    yield from _timelines(timelines_of(run))
    if run.saves:
        yield from _saves_table(run)
    if run.incidents:
        yield from _incidents_table(run)
    yield from _restores_table(run)
    yield f"<footer>fsdp-ckpt report {escape(__version__)}</footer>"


def _picture(figure: Figure) -> str:
    """Return a picture for wide windows and paper, and one for narrow windows."""
    wide, narrow = to_svg(figure.draw(WIDE)), to_svg(figure.draw(NARROW))
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _timelines(figures: Sequence[Figure]) -> Iterator[str]:
    if not figures:
        return
    yield '<section id="timelines"><h2>Saves, rank by rank</h2>'
    yield "<p>The newest, the slowest, and those that were not committed.</p>"
    for n, figure in enumerate(figures):
        yield f"<details{' open' if n < NUM_OPEN else ''}><summary>{escape(figure.title)} "
        yield f"<span>{escape(figure.caption)}</span></summary>{_picture(figure)}</details>"
    yield "</section>"


def _saves_table(run: Run) -> Iterator[str]:
    yield '<section id="table"><h2>All saves</h2>'
    if len(run.saves) > MAX_ROWS:
        yield f"<p>The newest {MAX_ROWS} of {len(run.saves)}; --json has all.</p>"
    yield '<div class="scroll"><table><thead><tr><th>step</th><th class="l m">begun, UTC</th>'
    yield '<th class="l">outcome</th><th>stall</th><th>total</th><th class="m">beside</th>'
    yield '<th class="m">size</th><th class="m">rate</th><th class="l m">last rank</th></tr></thead><tbody>'
    for save in reversed(run.saves[-MAX_ROWS:]):
        yield _save_row(save)
    yield "</tbody></table></div></section>"


def _save_row(save: Save) -> str:
    late = save.straggler
    last = f"{late.rank}, +{SECONDS.text(late.behind_s)}, {late.phase}" if late else "–"
    is_bad = " bad" if save.outcome in ("failed", "unknown") else ""
    overlap = "–" if save.overlap is None else f"{100 * save.overlap:.1f} %"
    size = "–" if save.num_bytes is None else BYTES.text(save.num_bytes)
    rate = "–" if save.rate is None else RATE.text(save.rate)
    shown = f"{save.outcome}, {save.mode}" if save.mode else save.outcome
    return (
        f'<tr><td>{save.step}</td><td class="l m">{clock_text(save.begun_s)}</td>'
        f'<td class="l{is_bad}">{escape(shown)}</td><td>{SECONDS.text(save.stall_s)}</td>'
        f'<td>{SECONDS.text(save.total_s)}</td><td class="m">{overlap}</td>'
        f'<td class="m">{size}</td><td class="m">{rate}</td><td class="l m">{escape(last)}</td></tr>'
    )


def _incidents_table(run: Run) -> Iterator[str]:
    yield '<section id="incidents"><h2>What went wrong</h2><div class="scroll"><table><thead><tr>'
    yield '<th>step</th><th class="l m">when, UTC</th><th class="l">what</th><th class="l">why</th>'
    yield "</tr></thead><tbody>"
    for incident in reversed(run.incidents[-MAX_ROWS:]):
        to = "" if incident.to_step is None else f" to step {incident.to_step}"
        step = "–" if incident.step is None else str(incident.step)
        yield f'<tr><td>{step}</td><td class="l m">{clock_text(incident.at_s)}</td>'
        yield f'<td class="l">{escape(incident.kind)}{to}</td>'
        yield f'<td class="t">{escape(incident.text)}</td></tr>'
    yield "</tbody></table></div></section>"


def _restores_table(run: Run) -> Iterator[str]:
    restores = [restore for restore in run.restores if restore.step is not None]
    if not restores:
        return
    laps = ("find", "compare", "read", "agree", "apply")
    yield '<section id="restores"><h2>Restores</h2><div class="scroll"><table><thead><tr>'
    yield '<th>step</th><th class="l m">begun, UTC</th><th>total</th>'
    yield "".join(f'<th class="m">{lap}</th>' for lap in laps) + "</tr></thead><tbody>"
    for restore in reversed(restores[-MAX_ROWS:]):
        yield f'<tr><td>{restore.step}</td><td class="l m">{clock_text(restore.begun_s)}</td>'
        yield f"<td>{SECONDS.text(restore.seconds)}</td>"
        for lap in laps:
            shown = SECONDS.text(restore.laps[lap]) if lap in restore.laps else "–"
            yield f'<td class="m">{shown}</td>'
        yield "</tr>"
    yield "</tbody></table></div></section>"
