"""A run loads what its plan names: no file of another strategy or backend, no package of another engine, and amp8 where
that computes something."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

ROOMS = ("strategies", "backends", "models", "amp8")
EVERY = """strategies strategies.base strategies.guard backends backends.base backends.linear backends.cpu_matmul
           models models.blocks models.dtypes models.layers models.live"""
TORCH, SHARDS = "backends.high_precision", "models.averages models.shards models.batch_norm models.meta_init"
LOADED = {  # beside those; of amp8 only that it is loaded at all
    "single_fp32": f"strategies.replicated {TORCH}",
    "zero2_bf16": f"""strategies.deepspeed strategies.deepspeed.zero strategies.deepspeed.engine {TORCH}
                      strategies.deepspeed.seen strategies.deepspeed.dummies models.averages models.batch_norm
                      models.meta_init""",
    "ddp_bf16": f"strategies.replicated {TORCH}",
    "fsdp_bf16": f"strategies.fsdp strategies.gathered {TORCH} {SHARDS}",
    "single_fp8": "strategies.replicated backends.emulation amp8",
    "fsdp_fp8_msamp_o2": f"strategies.fsdp strategies.gathered backends.levels amp8 {SHARDS}",
}
OF_OTHERS = {"deepspeed": "zero", "transformers.modeling_utils": ""}  # package: of which configs the strategy needs it
RUN = """
import json, pathlib, sys
import conftest
from conftest import CONFIGS, Ranks
from loop import loop

conftest.IMPORTED_ONCE = []

def run():
    loop()
    pathlib.Path(f"{config}.json").write_text(json.dumps([name.removeprefix("faithful.") for name in sys.modules]))

for config in sys.argv[2:]:
    file = pathlib.Path(f"{config}.yml")
    skip = "  skip: '2'\\n" if "fp8" in config else ""  # the model has no other layers than the first and the last
    file.write_text((CONFIGS / file).read_text() + skip)
    ranks = Ranks(file, ["--output_dir", config], processes=1, script=run)
    assert ranks.wait() == [0], ranks.text()
"""


@pytest.mark.parametrize("configs", ["single_fp32 zero2_bf16", "ddp_bf16 fsdp_bf16 single_fp8 fsdp_fp8_msamp_o2"])
def test_a_run_loads_no_file_of_another_strategy_or_backend(configs, tmp_path):
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT / 'tests')!r}){RUN}", "", *configs.split()]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    for config in configs.split():
        names = json.loads((tmp_path / f"{config}.json").read_text())
        ours = {name for name in names if name.split(".")[0] in ROOMS and not name.startswith("amp8.")}
        assert ours == {*EVERY.split(), *LOADED[config].split()}, config
        for name, strategy in OF_OTHERS.items():
            assert (name in names) == bool(strategy and config.startswith(strategy)), (config, name)
