"""Files for services that are not here: they parse, do what the lab itself does, and repeat no list of packages."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "TORCH", "VENV")
"""What a `make test` around these tests hands down: its options, and that it is not the outermost."""


def make(*arguments):
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


def test_github_runs_ci_run_and_nothing_else():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert workflow[True] == ["push", "pull_request"]  # YAML 1.1 reads "on" as true
    assert workflow["permissions"] == {"contents": "read"}
    [job] = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert job["container"]["image"] == "python:3.11-bookworm" and job["timeout-minutes"] == 30
    checkout, _, upload = job["steps"]
    assert "actions/checkout@" in checkout["uses"] and "actions/upload-artifact@" in upload["uses"]
    assert upload["with"]["path"] == "build/*.xml" and upload["if"] == "always()"
    assert job["env"]["PIP_EXTRA_INDEX_URL"] == CPU_BUILDS


def test_gitlab_runs_ci_run_and_nothing_else():
    jobs = yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text())
    [job] = jobs.values()
    assert job["script"] == ["bash .ci/run"] and not {"before_script", "after_script"} & job.keys()
    assert job["image"] == "python:3.11-bookworm" and job["timeout"] == "30 minutes"
    assert job["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "push"'}]
    assert job["artifacts"]["paths"] == [job["artifacts"]["reports"]["junit"]] == ["build/*.xml"]
    assert job["variables"]["PIP_EXTRA_INDEX_URL"] == CPU_BUILDS


def test_the_devcontainer_installs_what_make_installs():
    text = (ROOT / ".devcontainer/devcontainer.json").read_text()
    container = json.loads(re.sub(r"^//.*$", "", text, flags=re.MULTILINE))
    assert container["containerEnv"] == {"PIP_EXTRA_INDEX_URL": CPU_BUILDS}
    rule = subprocess.run(
        [*container["postCreateCommand"].split(), "--dry-run", "--always-make"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install --disable-pip-version-check -r requirements.txt" in rule.stdout


def test_binder_installs_the_same_pins():
    lines = (ROOT / "binder/requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        f"--extra-index-url {CPU_BUILDS}",
        "-r ../requirements.txt",
    ]
    assert {path.name for path in (ROOT / "binder").iterdir()} == {"requirements.txt", "runtime.txt"}


def test_the_wheelhouse_is_of_these_pins_and_servers_installs_from_it_as_make_says():
    rule = make("-n", "wheelhouse").stdout
    assert f"--index-url {CPU_BUILDS}" in rule and "-r /dev/stdin hatchling editables" in rule
    [command, of_tests] = re.findall(r"'    (\.venv/bin/pip install .*?)'", rule)
    assert command.endswith("--no-index --find-links build/wheelhouse -r requirements.txt")
    assert of_tests == command.replace(".txt", "-dev.txt")
    assert command in (ROOT / "course/servers.md").read_text()


@pytest.mark.parametrize(
    ("target", "installed"),
    [
        ("lab", ["requirements.txt"]),
        ("handout", ["requirements.txt"]),
        ("site", ["requirements.txt", "/dev/stdin"]),  # three lines of requirements-dev.txt: Sphinx and npm
        ("check", ["requirements.txt", "requirements-dev.txt"]),
        ("test", ["requirements.txt", "requirements-dev.txt"]),
    ],
)
def test_make_installs_what_a_target_needs_and_says_first_how_much_that_is(tmp_path, target, installed):
    said = make("--dry-run", target, f"VENV={tmp_path}/new").stdout
    assert re.findall(r"pip install .*-r (\S+)", said) == installed
    before, *after = re.split("^.*pip install", said, flags=re.MULTILINE)
    assert all(re.search(r"[\d.]+ GB", text) for text in (before, *after[:-1]))


def pretended_python(path, version):
    """A command that is as old as it says, and of a machine where nothing can be installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\ntest "$1" = -V && echo Python {version} || exit 1\n')
    path.chmod(0o755)
    return path


def test_make_says_which_python_it_needs_before_it_installs_anything(tmp_path):
    old, made = pretended_python(tmp_path / "old", "3.10.13"), tmp_path / "made"
    run = make("check", f"PYTHON={old}", f"VENV={made}")
    said = f"The lab needs Python 3.11 or newer, and {old} is not (Python 3.10.13): name one that is, as in make check "
    assert (run.returncode, run.stdout) == (2, f"{said}PYTHON=python3.12\n")
    assert not made.exists()


def test_make_does_not_use_a_different_python_than_the_one_that_is_named(tmp_path):
    there, named = pretended_python(tmp_path / "env/bin/python", "3.11.2"), pretended_python(tmp_path / "new", "3.13.0")
    (tmp_path / "env/ready").touch()
    run = make("check", f"PYTHON={named}", f"VENV={tmp_path}/env")
    said = f"{tmp_path}/env was made with Python 3.11.2, and {named} is Python 3.13.0: remove {tmp_path}/env, or add "
    assert (run.returncode, run.stdout) == (2, f"{said}VENV=.venv-other\n")
    assert there.exists()


def test_make_installs_a_different_torch_in_an_environment_of_its_own():
    rule = make("--dry-run", "--always-make", "check", "TORCH=2.11.0").stdout
    [change] = re.findall(
        r"^(sed .* requirements.txt) \| .venv-torch-2.11.0/bin/python -m pip install", rule, re.MULTILINE
    )
    changed = subprocess.run(
        change, shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in changed if line not in pins] == ["torch==2.11.0"] and len(changed) == len(pins)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "install-shared needs a folder: make install-shared PREFIX=/opt/lab"),
        (["PREFIX=/nowhere/lab", "PYTHON=/home/me/python"], "lies in a home, which other accounts cannot enter"),
    ],
)
def test_a_shared_installation_that_others_could_not_use_is_refused(options, said):
    run = make("install-shared", *options)
    assert run.returncode == 2
    assert said in run.stdout
