"""The notebook is executed from its first cell to its last, and is stored without what it prints."""

import json
import re
import sys

import pytest
from conftest import ROOT

NOTEBOOK = ROOT / "docs" / "first_steps.ipynb"


def test_it_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"]]


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="./launch.sh setup --extra dev")
    nbclient = pytest.importorskip("nbclient", reason="./launch.sh setup --extra dev")
    for name, value in {"STEPS": "30", "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "docs")}})
    client.create_kernel_manager()
    client.km.kernel_spec.argv = [
        sys.executable,
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
    ]  # this environment's, whatever kernels the user has
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    for config in ("ddp_bf16", "fsdp_bf16", "fsdp_fp8"):
        assert re.search(rf"{config} +accuracy 0\.\d", printed), printed[-3000:]
    assert "fsdp x2 gloo, sharded by Block | fp8 torchao" in printed or "nccl" in printed
