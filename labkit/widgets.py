"""Controls around the pictures of `labkit.plots`: what the reader of a notebook moves. Drawing stays there."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import ipywidgets as widgets

from labkit.layout import ParallelLayout
from labkit.plots.layout_table import layout_table
from labkit.plots.painter import LayoutPainter
from labkit.plots.style import DP, INK, PP
from labkit.sizing import GPT, step_traffic

WORLD_SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NODE_SIZES = (1, 2, 4, 8, 16, 36, 72)
MODEL, BATCH_SIZE = GPT(num_layers=36, hidden_size=4096, seq_length=2048, vocab_size=51200), 512
"""Whose bytes the table counts: one of the models in table 1 of arXiv 2104.04473."""
ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp")

STYLE = f"""<style>
img.labkit-grids {{ width: 100%; max-width: 1250px; height: auto; }}
.labkit-says {{ padding: .4em .8em; line-height: 1.4; border-left: 6px solid {DP}; }}
.labkit-says.misfit {{ border-color: {PP}; background: #FFF1E6; color: {INK}; }}
.labkit-facts {{ border-collapse: collapse; line-height: 1.45; }}
.labkit-facts caption {{ text-align: left; padding: .3em 0; }}
.labkit-facts th, .labkit-facts td {{ text-align: left; vertical-align: top; padding: .2em 1.2em .2em 0; }}
table.labkit-facts tbody {{ border-top: 1px solid var(--jp-border-color2, #ddd); }}
.labkit-facts span {{ white-space: nowrap; margin-right: .7em; }}
.labkit-stale {{ opacity: .45; }}
</style>"""


class Choice(NamedTuple):
    """What the controls say; it need not fit."""

    world_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    order: str

    def layout(self) -> ParallelLayout:
        """The layout of these sizes; ValueError if they do not fit."""
        order = self.order if "cp" in self.order or self.cp_size == 1 else self.order.replace("tp", "tp-cp")
        return ParallelLayout(self.world_size, self.tp_size, self.pp_size, self.cp_size, order)


def layout_explorer(
    world_size: int = 16,
    tp_size: int = 2,
    pp_size: int = 4,
    cp_size: int = 1,
    order: str = "tp-dp-pp",
    gpus_per_node: int = 8,
    follow: int | None = None,
) -> "LayoutExplorer":
    """The grids of a layout with a control for everything that decides it; ValueError if the start does not fit."""
    return LayoutExplorer(Choice(world_size, tp_size, pp_size, cp_size, order), gpus_per_node, follow)


class LayoutExplorer(widgets.VBox):
    """Three grids, their facts as text, and the controls above them.

    ``shown`` is the layout in the picture: the last that fitted. ``fits`` says whether it is what the controls say.
    """

    def __init__(self, choice: Choice, gpus_per_node: int, follow: int | None):
        self.shown, self.fits = choice.layout(), True
        self.world_size = _selection("world size n", WORLD_SIZES, choice.world_size)
        self.tp_size = _slider("tensor t", choice.tp_size, 1, 16)
        self.pp_size = _slider("pipeline p", choice.pp_size, 1, 64)
        self.context = _checkbox("context parallelism", choice.cp_size > 1, "c GPUs share each sequence")
        self.cp_size = _slider("context c", choice.cp_size, 1, 16)
        self.order = _dropdown("order", ORDERS, choice.order)
        self.gpus_per_node = _dropdown("GPUs per node", NODE_SIZES, gpus_per_node)
        self.following = _checkbox("follow a GPU", follow is not None, "show the peers of GPU g")
        self.follow = _slider("GPU g", follow or 0, 0, choice.world_size - 1)

        self.message = widgets.HTML()
        self.picture = widgets.Image(format="png")
        self.picture.add_class("labkit-grids")
        self.table = widgets.HTML()
        self._painter, self._updating = LayoutPainter(), False
        super().__init__([widgets.HTML(STYLE), *self._controls(), self.message, self.picture, self.table])
        for control in self._inputs():
            control.observe(self._update, "value")
        self._update()

    def __repr__(self) -> str:
        """Short, because it is what a stored notebook keeps of a widget."""
        sizes = ", ".join(f"{name}={value!r}" for name, value in self.choice._asdict().items())
        return f"layout_explorer({sizes}, gpus_per_node={self.gpus_per_node.value})"

    @property
    def choice(self) -> Choice:
        """What the controls say now."""
        return Choice(*(getattr(self, name).value for name in Choice._fields))

    def _inputs(self) -> list:
        chosen = [getattr(self, name) for name in Choice._fields]
        return [*chosen, self.gpus_per_node, self.following, self.follow]

    def _controls(self) -> list:
        follow = widgets.HBox([self.following, self.follow])
        context = widgets.HBox([self.context, self.cp_size])
        chosen = [self.world_size, self.tp_size, self.pp_size, self.order, self.gpus_per_node, follow, context]
        self.context.observe(self._fold_context, "value")
        self._fold_context()
        return [widgets.Box(chosen, layout=widgets.Layout(flex_flow="row wrap"))]

    def _fold_context(self, change=None) -> None:
        """The slider of c appears when it is asked for: by a checkbox, as no key opens an accordion of ipywidgets."""
        self.cp_size.layout.display = None if self.context.value else "none"
        if not self.context.value:
            self.cp_size.value = 1

    def _update(self, change=None) -> None:
        if self._updating:  # the slider that follows was moved by us, not by the reader
            return
        try:
            self.shown, self.fits, said = self.choice.layout(), True, ""
        except ValueError as error:
            self.fits, said = False, str(error)
        self._updating = True
        self.follow.max = self.shown.world_size - 1
        self.follow.disabled = not self.following.value
        self._updating = False
        self._show(said)

    def _show(self, misfit: str) -> None:
        node: int = self.gpus_per_node.value  # type: ignore[assignment]
        follow = self.follow.value if self.following.value else None
        self.picture.value = self._painter.png(self.shown, node, follow=follow, dimmed=not self.fits)
        self.message.value = _says(self.shown, misfit)
        traffic = step_traffic(MODEL, self.shown, gpus_per_node=node, batch_size=BATCH_SIZE)
        table = layout_table(self.shown, node, follow=follow, traffic=traffic, traffic_of=_MODEL_TEXT)
        self.table.value = table if self.fits else f'<div class="labkit-stale">{table}</div>'


def _says(layout: ParallelLayout, misfit: str) -> str:
    if misfit:
        text = f"<b>This does not fit.</b> {escape(misfit)}. Below, greyed: the last layout that did."
        return f'<div class="labkit-says misfit" role="alert">{text}</div>'
    copies = f"{layout.dp_size} cop{'y' if layout.dp_size == 1 else 'ies'} of the model"
    each = "each " if layout.dp_size > 1 else ""
    text = f"{_product(layout)}: {copies}, {each}on {layout.world_size // layout.dp_size} GPUs"
    return f'<div class="labkit-says" role="status">{text}</div>'


def _product(layout: ParallelLayout) -> str:
    factors = {"p": layout.pp_size, "t": layout.tp_size, "c": layout.cp_size, "d": layout.dp_size}
    if layout.cp_size == 1:
        del factors["c"]
    return f"{' · '.join(factors)} = {' · '.join(map(str, factors.values()))} = {layout.world_size} = n"


_MODEL_TEXT = (
    f"a GPT of {MODEL.num_parameters / 1e9:.1f} billion parameters, {BATCH_SIZE} sequences of {MODEL.seq_length} tokens"
)
_LOOK = {"layout": {"width": "290px"}, "style": {"description_width": "7.5em"}}  # three in a line at 1400 pixels


def _slider(description: str, value: int, low: int, high: int) -> widgets.IntSlider:
    return widgets.IntSlider(value, low, max(high, value), description=description, **_LOOK)


def _checkbox(description: str, value: bool, tooltip: str) -> widgets.Checkbox:
    return widgets.Checkbox(value, description=description, tooltip=tooltip, indent=False, layout={"width": "165px"})


def _selection(description: str, usual: Sequence[int], value: int) -> widgets.SelectionSlider:
    options = sorted({*usual, value})
    return widgets.SelectionSlider(options=options, value=value, description=description, **_LOOK)


def _dropdown(description: str, usual: Sequence, value) -> widgets.Dropdown:
    options = [*usual] if value in usual else [*usual, value]
    return widgets.Dropdown(options=options, value=value, description=description, **_LOOK)
