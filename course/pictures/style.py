"""The look of every picture: a colour for each idea, and how numbers are written.

The colours are Okabe and Ito's and one of Tol's, which colour-blind readers can tell apart. Each has one meaning in the
whole lab; experts' tensor and data groups have the colours of tensor and data groups. Groups of one axis are tints of
that axis's colour and carry a letter, so no picture depends on colour alone.
"""

from functools import lru_cache
from math import log10
from operator import mul

TP = "#0072B2"
PP = "#D55E00"
DP = "#009E73"
CP = "#CC79A7"
EP = "#332288"  # indigo, of Paul Tol's "muted" colours: Okabe and Ito's are all taken
FORWARD = "#56B4E9"
BACKWARD = "#F0E442"
WEIGHT_GRADIENT = "#E69F00"  # the half of a split backward that no rank waits for: the last of Okabe and Ito's colours
IDLE = "#E5E7EB"
INK = "#1F2933"
MUTED = "#5B6770"  # the ink of what a reader may skip: 5.9 to 1 on white, still easy to read
GREY = "#9AA5AE"
FRAME, FRAME_FILL = "#AEB8C0", "#F5F7F9"

KIND_COLOR = {"forward": FORWARD, "backward": BACKWARD, "weight_gradient": WEIGHT_GRADIENT, "optimizer": MUTED}
AXIS_COLOR = {"tp": TP, "cp": CP, "dp": DP, "pp": PP, "expert_tp": TP, "ep": EP, "expert_dp": DP}
AXIS_NAME = {
    **{"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"},
    **{"expert_tp": "expert tensor", "ep": "expert", "expert_dp": "expert data"},
}

RANK_COLOR = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#dddddd")
"""Paul Tol's light scheme, made for labelled boxes: safe for colour-blind readers, and none of the axes' colours."""

TINTS = (0.16, 0.58, 0.34, 0.78)  # how much of its axis's colour a group gets: neighbours here are far apart


def group_letter(index: int) -> str:
    """Return A, B, ... Z, then AA, AB, ... as a spreadsheet names its columns.

    >>> group_letter(0), group_letter(25), group_letter(26)
    ('A', 'Z', 'AA')
    """
    first = group_letter(index // 26 - 1) if index > 25 else ""
    return first + chr(ord("A") + index % 26)


@lru_cache(maxsize=1024)
def tint(color: str, strength: float) -> str:
    """Return this colour diluted with white: strength 1.0 is the colour itself, 0.0 is white.

    >>> tint("#0072B2", 1.0), tint("#0072B2", 0.5), tint("#0072B2", 0.0)
    ('#0072b2', '#80b8d8', '#ffffff')
    """
    return "#" + "".join(f"{round(255 - strength * (255 - channel)):02x}" for channel in bytes.fromhex(color[1:]))


def tints(color: str, number: int) -> list[str]:
    """Return the tints of this many ranks or groups, in their order."""
    return [tint(color, TINTS[index % len(TINTS)]) for index in range(number)]


def tint_means(num_ranks: int) -> str:
    """Say what a tint of `tints` stands for: with more ranks than tints, not one rank alone.

    >>> tint_means(4), tint_means(16)
    ('A tint is a rank', 'Tints repeat after 4 ranks')
    """
    return "A tint is a rank" if num_ranks <= len(TINTS) else f"Tints repeat after {len(TINTS)} ranks"


@lru_cache(maxsize=1024)
def text_on(background: str) -> str:
    """Return white or ink, whichever stands out more on this background (by WCAG's contrast ratio)."""
    light = _luminance(background) if background != "none" else 1.0
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / (_luminance(INK) + 0.05) else INK


def _luminance(color: str) -> float:
    channels = (channel / 255 for channel in bytes.fromhex(color[1:]))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(map(mul, linear, (0.2126, 0.7152, 0.0722)))


def three_digits(value: float) -> str:
    """Write a number as a reader wants it in a picture.

    >>> three_digits(0.04567), three_digits(12.345), three_digits(1302.4)
    ('0.0457', '12.3', '1,302')
    """
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def bytes_text(number: float) -> str:
    """Write a volume with three digits and its unit, in powers of 1000.

    >>> bytes_text(927_712_935_936), bytes_text(4.3e12), bytes_text(0)
    ('928 GB', '4.3 TB', 'none')
    """
    if number == 0:
        return "none"
    power = min(int(log10(number)) // 3, 5)
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def rank_color(rank: int) -> str:
    """Return a rank's colour: from the eighth on, the first ones again, each time paler."""
    return tint(RANK_COLOR[rank % 8], 0.55 ** (rank // 8))
