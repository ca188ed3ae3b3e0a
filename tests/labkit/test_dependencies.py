"""labkit is imported and used where nothing is installed but torch, cloudpickle and tqdm; labtrain loads late."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFUSED = [
    "tyro",
    "safetensors",
    "tokenizers",
    "matplotlib",
    "ipywidgets",
    "IPython",
    "anywidget",
    "labtrain",
    "course",
]
HOOK = f"""
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {REFUSED}:
            raise ModuleNotFoundError(f"refused here: {{name}}", name=name)

sys.meta_path.insert(0, Refuses())
"""
USE = """
import importlib, pkgutil, labkit
names = [module.name for module in pkgutil.walk_packages(labkit.__path__, "labkit.")]
for name in names:
    importlib.import_module(name)

from labkit.launch import launch

def train_a_layer():
    import torch
    from labkit.groups import init_groups
    from labkit.layout import ParallelLayout
    from labkit.tensor_parallel import ParallelMLP
    try:
        import tyro
    except ModuleNotFoundError as error:
        assert "refused here" in str(error)
    groups = init_groups(ParallelLayout(world_size=2, tp_size=2))
    layer = ParallelMLP(8, 32, groups.tp)
    layer(torch.ones(2, 3, 8)).sum().backward()
    return all(param.grad is not None for param in layer.parameters())

print(len(names), launch(train_a_layer, world_size=2))
"""


def run(code: str, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, **environment}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_labkit_needs_torch_cloudpickle_and_tqdm_only(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HOOK)  # the ranks' processes import it, too
    said = run(USE, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "[True, True]" in said and int(said.splitlines()[-1].split()[0]) > 50  # modules


def test_labtrain_alone_imports_no_torch_and_changes_nothing():
    code = "import os, sys; before = dict(os.environ); import labtrain\n"
    code += "print('torch' in sys.modules, 'tyro' in sys.modules, before == dict(os.environ))\n"
    code += "from labtrain import TrainConfig; print(TrainConfig.__module__, 'tyro' in sys.modules)"
    assert run(code).splitlines() == ["False False True", "labtrain.config False"]
