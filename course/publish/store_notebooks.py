"""Runs notebooks, each in a fresh kernel, and stores what they printed and drew: `make notebooks`.

Two runs store the same bytes: timestamps, widget state and random widget ids go, and where a cell says that its
output is not to be compared (times, machine facts: the tag nbval-ignore-output), the stored output stays unless
something besides its numbers and pictures changed, or an output that is compared has changed anywhere: then those
numbers may come from code that was edited, too. With --fresh they are stored anew in any case.

The results with which questions are compared go into results.json, for the pages.

usage: python -m course.publish.store_notebooks [--fresh | --strip-only] NOTEBOOK_OR_FOLDER...
"""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

from course.working_copy import within
from labtrain.command_line import run_command

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
RESULTS = Path(__file__).with_name("results.json")
ASK = """import json
from course.progress import questions
print(json.dumps({key: each.result for key, each in questions().items() if each.result is not None}))"""
"""Run after the last cell: what its notebook has computed for its questions."""
OF_A_SESSION = "execution", "collapsed", "scrolled"
"""What JupyterLab keeps in a cell's metadata of how it ran and how it was last looked at."""


def strip(notebook):
    """Take out what changes from run to run; outputs, counts and cell ids stay."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        for key in OF_A_SESSION:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = _merge_streams(filter(None, map(_without_widget, cell.outputs)))
    return notebook


def _without_widget(output):
    """A widget's view is an id that means nothing in another session: keep its text. A place that is empty goes."""
    data = output.get("data")
    if data:
        data.pop(WIDGET_VIEW, None)
    return None if data == {} else output


def _merge_streams(outputs: Iterable) -> list:
    """Lines printed after each other arrive in one message or in several: make it one."""
    merged = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream" and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def keep_stored(new, old) -> None:
    """Where only numbers and pictures of uncompared outputs changed, keep those already stored."""
    stored = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
    pairs = [(cell, stored[cell.id]) for cell in new.cells if cell.id in stored]
    compared = [pair for pair in pairs if "nbval-ignore-output" not in pair[0].metadata.get("tags", [])]
    if any(cell.outputs != before.outputs for cell, before in compared):
        return
    for cell, before in pairs:
        if _shape(cell.outputs) == _shape(before.outputs):
            cell.outputs = before.outputs


def _shape(outputs) -> str:
    """The outputs as text, without numbers and pictures."""
    text = json.dumps(outputs, sort_keys=True)
    text = re.sub(r'"image/[\w+]+": "(\\.|[^"\\])*"|base64,[\w+/=]*', "", text)
    return re.sub(r"\s*\d[\d.,]*(e[+-]?\d+)?\s*", "0", text)  # with the spaces that align them


def store(path: Path, fresh: bool, strip_only: bool) -> bool:
    """Run and store one notebook; true where the file changed."""
    before = path.read_text()
    notebook, old = (nbformat.reads(before, as_version=4) for _ in range(2))
    if not strip_only:
        notebook.cells.append(nbformat.v4.new_code_cell(ASK))
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=300,
            record_timing=False,
            store_widget_state=False,
            resources={"metadata": {"path": str(path.parent)}},
        ).execute()
        keep_results(json.loads(notebook.cells.pop().outputs[0].text))
    strip(notebook)
    if not (fresh or strip_only):
        keep_stored(notebook, old)
    after = nbformat.writes(notebook) + "\n"
    if after != before:
        path.write_text(after)
    return after != before


def keep_results(found: dict) -> None:
    """Store the results of questions, unless they count as the same as those that are stored."""
    stored = json.loads(RESULTS.read_text())
    news = {key: each for key, each in found.items() if key not in stored or not _is_same(key, each, stored[key])}
    if news:
        text = json.dumps(stored | news, indent=1, sort_keys=True, ensure_ascii=False)
        RESULTS.write_text(text + "\n")


def _is_same(key: str, result, stored) -> bool:
    from course.progress import questions  # late: it imports torch, which stripping does not need

    return key in questions() and questions()[key].is_same(stored, result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="store times and machine facts anew too")
    parser.add_argument("--strip-only", action="store_true", help="run nothing; fail where something was stripped")
    parser.add_argument("paths", nargs="+", type=Path)
    args = parser.parse_args()
    notebooks = [notebook for path in args.paths for notebook in within(path)]
    bar = tqdm(notebooks, disable=args.strip_only)
    changed = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LABKIT_PROGRESS"] = f"{folder}/progress.json"  # the page of somebody who has solved nothing yet
        for path in bar:
            bar.set_description(path.name)
            if store(path, args.fresh, args.strip_only):
                changed.append(path.name)
    print("changed: " + ", ".join(changed) if changed else "nothing changed")
    return 1 if args.strip_only and changed else 0


if __name__ == "__main__":
    run_command(main)
