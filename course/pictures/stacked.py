"""Makes a diagram narrow enough for a phone: its columns stand in bands below each other, in letters of 16 pixels.

A wide picture, and the narrow one that is made of it:

    Shards of W          (header)            Shards of W
             a   b   c   d                            a   b
    rank 0  [0] [1] [2] [3]                  rank 0  [0] [1]
    rank 1  [4] [5] [6] [7]                  rank 1  [4] [5]    (first band)
    # tp                 (legend)                     c   d
                                             rank 0  [2] [3]
                                             rank 1  [6] [7]    (second band)
                                             # tp

- Column: the marks between two gaps that go from top to bottom. The first one here has the row names.
- Band: columns that stand side by side in the narrow picture, with the row names before them.
- Scale and stretch: what lengths across and down are multiplied by (`Fit`). All columns have the same, if they can.
- Panel: a title and all that is below it. A picture with several titles has several, which are made narrow one by one.

Like a timeline (`course.pictures.narrow`), a diagram is read from its marks, so one that a notebook stored as SVG gets
the same narrow form. The parts, in the order in which they work: `stacked_wide` reads the marks; `stacked_bars` draws
a picture of bars; `stacked_layout` chooses scale and bands, for which `stacked_column` draws each column;
`stacked_bands` draws the bands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import wrap

from course.pictures.narrow import LETTERS, LINE, MOST_BANDS, MOST_ROWS, WIDTH, fold, legend_in_lines, scene_of
from course.pictures.scene import Mark, Scene, is_scene, label
from course.pictures.stacked_bands import draw_bands
from course.pictures.stacked_bars import draw_bars
from course.pictures.stacked_column import Fit
from course.pictures.stacked_wide import WidePicture, extent_down, panels

LETTERS_PER_LINE = 34  # of a header: `text_width` is an estimate, and most lines are narrower
BOLD_LETTERS_PER_LINE = 30


def narrow(scenes: Sequence[Scene]) -> list[Scene]:
    """Return steps for a narrow screen; as they are if one of them is neither a timeline nor stands in columns."""
    folded = [fold(scene) for scene in scenes]
    is_timeline = folded[0] is not scenes[0]
    if is_timeline or any(scene.panels or scene.clock for scene in scenes):
        return folded
    return stack(scenes, is_low=True) or folded


def narrow_svgs(svgs: Sequence[str]) -> list[str]:
    """Return stored pictures that belong together for a narrow screen; "" for one that has no such form."""
    if not all(map(is_scene, svgs)):
        return ["" for _ in svgs]
    scenes = [scene_of(svg) for svg in svgs]
    made = [fold(scene, MOST_ROWS * MOST_BANDS) for scene in scenes]
    has_timeline = any(each is not scene for each, scene in zip(made, scenes))
    if not has_timeline:
        made = stack(scenes) or made
    return [each.svg() if each is not scene else "" for each, scene in zip(made, scenes)]


def stack(scenes: Sequence[Scene], is_low: bool = False) -> list[Scene]:
    """Return steps with their columns in bands, in the same way if they can; [] if one of them cannot.

    A low picture has as few bands as can be, however narrow its columns: it stays in view while a control moves.
    """
    stacked = []
    fit = None
    for scene in scenes:
        marks: list[Mark] = []
        bottom = -LINE
        for panel in panels(scene.marks):
            made, fit = _stack_panel(panel, bottom + LINE, fit, is_low)
            if not made:
                return []
            bottom = max(extent_down(mark)[1] for mark in made)
            marks += made
        stacked.append(replace(scene, marks=marks, height=bottom, width=WIDTH))
    return stacked


def _stack_panel(marks: Sequence[Mark], y: float, fit: Fit | None, is_low: bool) -> tuple[list[Mark], Fit | None]:
    """Return the marks of a panel from y on, with this fit if it can be, and the fit; [] if it has no narrow form."""
    wide = WidePicture(marks)
    if not wide.all_columns:
        return [], fit
    says = ""
    if bars := draw_bars(wide):
        bands = [bars]
    else:
        bands, fit = draw_bands(wide, fit, is_low)
        says = "Rows: ranks." if fit and fit.has_numbers else ""
    if not bands:
        return [], fit
    made = [*_header(wide.header, says, y)]
    y = made[-1].y + LINE if made else y
    for band in bands:
        top = min(extent_down(mark)[0] for mark in band)
        bottom = max(extent_down(mark)[1] for mark in band)
        made += [mark.changed(y=mark.y - top + y) for mark in band]
        y += bottom - top + LINE
    return [*made, *legend_in_lines(wide.legend, y, WIDTH)], fit


def _header(labels: Sequence[Mark], says: str, y: float) -> Iterator[Mark]:
    """Yield the title and what is said below it, in as many lines as they need; ``says`` is the last line."""
    y -= LINE / 2
    for mark in labels:
        texts = wrap(mark.text, BOLD_LETTERS_PER_LINE if mark.bold else LETTERS_PER_LINE)
        for number, text in enumerate(texts):
            y += LINE
            key = f"{mark.key}~{number}" if number else mark.key
            yield mark.changed(key=key, x=0.0, y=y, text=text, size=LETTERS, anchor="start")
    if says:
        first = labels[0].key if labels else ""
        yield label(f"narrow.{first}", 0, y + LINE, says, size=LETTERS)
