"""Opens the lab in JupyterLab, on notebooks of the reader's own. `make lab` calls it.

python -m course.open                       the notebooks are beside the lab or, if that is not yours, in your home
python -m course.open --folder ~/parallel   they are there
python -m course.open --port=8900           what else is given, JupyterLab gets
"""

import argparse
import os
from pathlib import Path

from course import working_copy
from course.measure.environment import folders_to_mend
from labtrain.command_line import run_command


def own_folder() -> Path:
    """Return where the reader's notebooks are: beside the lab if the reader may write there, else in their home."""
    beside = working_copy.ROOT / "my_copy"
    is_own = os.access(beside if beside.exists() else working_copy.ROOT, os.W_OK)
    return beside if is_own else Path.home() / "megatron-lab"


def jupyter_options(folder: Path) -> list[str]:
    """Return how JupyterLab is started: on this machine only, and without a browser where there is no screen."""
    options = ["--ip=127.0.0.1", f"--ServerApp.root_dir={folder}", "--LabApp.default_url=/lab/tree/Start_Here.ipynb"]
    options += ["--Application.log_level=ERROR"]
    options += ["--allow-root"] if os.geteuid() == 0 else []
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return options if has_screen else [*options, "--no-browser"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Open the lab in JupyterLab, on notebooks of your own.")
    parser.add_argument("--folder", type=Path, default=own_folder(), help="where your notebooks are (%(default)s)")
    given, others = parser.parse_known_args()
    asked = given.folder.absolute()
    folder = working_copy.without_earlier(asked)
    if folder != asked:
        print(f"{asked} is of an earlier version of the lab. It stays as it is.")
    for line in folders_to_mend():
        parser.error(line)
    try:
        newer = working_copy.make(folder)
    except OSError as error:
        parser.error(
            f"your notebooks cannot be kept in {folder} ({error.strerror}): give --folder with one of your own"
        )
    print(f"Your notebooks are in {folder}.")
    for path in newer:
        print(f"{path.relative_to(folder)} is a newer version. Yours stays as it is.")
    start(jupyter_options(folder) + others)


def start(options: list[str]) -> None:
    """Run JupyterLab until it is stopped; all that it says by itself is its address."""
    from jupyterlab.labapp import LabApp

    server = LabApp.initialize_server(argv=options)
    print(server.display_url, flush=True)
    server.identity_provider.token_generated = False  # else Jupyter says it once more, among advice
    server.start()


if __name__ == "__main__":
    run_command(main)
