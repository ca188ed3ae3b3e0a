"""Shows a verdict: in a notebook with a sign, a word and a colour, in a terminal as plain text."""

from dataclasses import dataclass
from html import escape

LOOKS = {
    "passed": ("✓ correct", "#00684C"),
    "not attempted": ("○ not attempted yet", "#5B6770"),
    "wrong": ("✗ not right yet", "#B04A00"),
    "raised": ("✗ raised an error", "#B04A00"),
    "stuck": ("✗ the ranks are stuck", "#B04A00"),
    "endless": ("✗ does not come back", "#B04A00"),
}
"""What a notebook writes above each kind of verdict, white on a colour that is dark enough."""


@dataclass(frozen=True)
class Feedback:
    """The text of a verdict, and its ``status``: one of `LOOKS`."""

    status: str
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        word, color = LOOKS[self.status]
        head = f'<b style="background: {color}; color: #fff; padding: .1em .6em; border-radius: 3px">{word}</b>'
        body = f'<pre style="margin: .4em 0 0; background: none; color: inherit">{escape(self.text)}</pre>'
        bar = f"border-left: 6px solid {color}; padding: .2em .8em"
        return {"text/plain": self.text, "text/html": f'<div role="status" style="{bar}">{head}{body}</div>'}


def give_feedback(status: str, text: str) -> None:
    """Show a verdict; outside a notebook, print its text."""
    from IPython.display import display  # late: ranks import this module too, and need no display

    display(Feedback(status, text))
