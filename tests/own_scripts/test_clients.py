"""Scripts that know nothing of this project (tests/clients), under its configs by `python -m faithful`."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import accelerate.test_utils
import pytest
import torch
from conftest import ROOT, Ranks, edited, launched, record, refusal, train
from reports import best_is_saved, keeps_the_best
from safetensors.torch import load_file

from faithful import __main__ as door
from faithful.checkpoint import checkpoints
from faithful.launch import rank_sync
from faithful.scripts.alone import saves_alone
from faithful.scripts.trainer import IN_PARTS, OPTIMIZER

CLIENTS = ROOT / "tests" / "clients"


def there(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (setup --extra dev)")


def run(client, config, folder, code=0, wins=False, script=None, more=None):
    """The folder of a run of tests/clients/<client>.py, in forked ranks."""
    sys.path.insert(0, str(CLIENTS))
    env = {"FAITHFUL_PROJECT_DIR": str(folder / "run")} | ({"FAITHFUL_CONFIG_WINS": "1"} if wins else {})
    env |= more or {}
    (folder / "out").mkdir(exist_ok=True)
    ranks = Ranks(config, ["--output_dir", str(folder / "out")], script=script or CLIENTS / f"{client}.py", env=env,
                  before=lambda rank: door.take_its_place())  # fmt: skip
    codes = ranks.wait()
    sys.path.remove(str(CLIENTS))
    assert set(codes) == ({code} if isinstance(code, int) else code), f"exit codes {codes}\n{ranks.text()[-4000:]}"
    return ranks.text()


def told(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "out").glob("rank*.json"))]


def of(folder):
    return record(sorted(folder.rglob("run.json"))[0].parent)


@pytest.mark.parametrize(
    ("client", "config"),
    [
        pytest.param("causal", "ddp_bf16", marks=there("transformers")),
        pytest.param("classifier", "ddp_fp8", marks=[there("transformers"), pytest.mark.slow]),
        pytest.param("sft", "ddp_fp8", marks=[there("trl"), pytest.mark.slow]),
        pytest.param("classifier", "zero2_bf16", marks=there("transformers")),
        pytest.param("diffusion", "ddp_bf16", marks=[there("denoising_diffusion_pytorch"), pytest.mark.slow]),
        pytest.param("averages", "ddp_bf16", marks=[there("timm", "diffusers"), pytest.mark.slow]),
        pytest.param("own_loop", "ddp_bf16", marks=pytest.mark.slow),
        pytest.param("sentences", "ddp_bf16", marks=[there("sentence_transformers"), pytest.mark.slow]),
        ("gan", "ddp_bf16"),
    ],
)
def test_two_processes_of_one_run_end_with_equal_weights(tmp_path, client, config):
    run(client, config, tmp_path, wins=client == "diffusion", more={"TORCH_EXTENSIONS_DIR": str(tmp_path / "built")})
    assert not [*tmp_path.glob("built/*")], "a rehearsal compiles nothing of DeepSpeed's"
    made, ranks = of(tmp_path), told(tmp_path)
    assert [rank["processes"] for rank in ranks] == [2, 2] and ranks[0]["weights"] == ranks[1]["weights"]
    assert made["status"] == "finished" and made["recipe"] == client and made["plan"]["config"] == config
    assert made["seen"]["loss_curve"][0][0] == 1
    assert made["evidence"]["measured"].startswith(f"{made['plan']['strategy']} x2 gloo")
    assert made["evidence"]["linear_converted"] > 0 or "fp8" not in config
    assert len(made["evidence_of_other_models"]) == (client == "gan")


def changed(client, folder, *changes):
    """The client as a file of its own, with pairs of (text, what stands there instead)."""
    text = (CLIENTS / f"{client}.py").read_text()
    for before, after in changes:
        text = edited(text, before, after)
    folder.mkdir(exist_ok=True)
    (folder / f"{client}.py").write_text(text)
    return folder / f"{client}.py"


def weights_of(folder):
    return {
        name: weight.double() for name, weight in load_file(folder / "out" / "weights" / "model.safetensors").items()
    }


def apart(a, b):
    """Largest absolute difference between the weights that two runs end with."""
    a, b = weights_of(a), weights_of(b)
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize(
    "client",
    [
        "own_loop",
        pytest.param("gan", marks=pytest.mark.slow),
        pytest.param("classifier", marks=[there("transformers"), pytest.mark.slow]),
    ],
)
def test_fsdp_ends_where_ddp_ends(tmp_path, client):
    """In float64, where sums in another order differ by about 1e-16. AdamW divides by its eps of 1e-8 at worst, and a
    step of 1e-3 makes 1e-11 of that. A clipping or a sample that is another one makes 1e-3."""
    runs = {}
    for config in ("ddp_fp32", "fsdp_fp32"):
        double = [("import torch\n", "import torch\n\ntorch.set_default_dtype(torch.float64)\n")]
        double += [(".float()", "")] if client != "classifier" else []
        run(client, config, tmp_path / config, script=changed(client, tmp_path / config, *double))
        runs[config] = record(sorted((tmp_path / config).rglob("run.json"))[0].parent)
    assert runs["fsdp_fp32"]["evidence"]["sharded"] and not runs["ddp_fp32"]["evidence"]["sharded"]
    assert weights_of(tmp_path / "ddp_fp32") and apart(tmp_path / "ddp_fp32", tmp_path / "fsdp_fp32") < 1e-9


@pytest.mark.slow
@there("trl")
def test_a_default_sft_config_is_rehearsed_on_a_cpu(tmp_path):
    """It says bf16=True, for which transformers wants a GPU before there is an Accelerator, and checkpoints layers."""
    script = changed("sft", tmp_path, ("bf16=False, gradient_checkpointing=False, ", ""))
    done = launched("./launch.sh", "single_bf16", script, tmp_path,
                    env={"FAITHFUL_PROJECT_DIR": str(tmp_path / "run"), "PYTHONPATH": str(CLIENTS)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "run")["evidence"]["dtypes"]["linear_output"] == "bfloat16"


IN_16_BIT = {"causal": ("optim=", "{}=True, optim="), "sft": ("bf16=False, ", "{}=True, ")}


@pytest.mark.parametrize(
    ("client", "config", "argument"),
    [
        pytest.param("causal", "ddp_bf16", "bf16", marks=there("transformers")),
        pytest.param("causal", "ddp_fp16", "fp16", marks=there("transformers")),
        pytest.param("causal", None, "bf16", marks=[there("transformers"), pytest.mark.slow]),
        pytest.param("causal", "fsdp_bf16", "bf16", marks=[there("transformers"), pytest.mark.slow]),
        pytest.param("sft", "single_bf16", "bf16", marks=[there("trl"), pytest.mark.slow]),
    ],
)
def test_arguments_in_16_bit_are_rehearsed_on_a_cpu(tmp_path, client, config, argument):
    """transformers raises an error where there is no GPU. Without a config the argument's precision applies."""
    before, after = IN_16_BIT[client]
    script = changed(client, tmp_path, (before, after.format(argument)))
    if config is None:
        env = {"PYTHONPATH": f"{ROOT}:{CLIENTS}", "FAITHFUL_PROJECT_DIR": str(tmp_path / "run")}
        done = launched(sys.executable, "-m", "faithful", str(script), str(tmp_path), env=env)
        assert done.returncode == 0, done.stderr
    else:
        run(client, config, tmp_path, script=script)
    made = of(tmp_path)
    assert made["plan"]["precision"] == argument and made["status"] == "finished"
    assert made["evidence"]["dtypes"]["linear_output"] in (None, {"bf16": "bfloat16", "fp16": "float16"}[argument])


@there("transformers")
@pytest.mark.parametrize("config", ["zero2_bf16", pytest.param("ddp_bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("client", ["classifier", pytest.param("causal", marks=pytest.mark.slow)])
def test_the_recorded_loss_of_accumulated_micro_batches_is_the_trainers(tmp_path, client, config):
    """A model that takes num_items_in_batch divides its loss by it, the Trainer divides that of another one, and both
    tell DeepSpeed to leave it as it is."""
    more = {"causal": [("size=4,", "size=4, gradient_accumulation_steps=2,")]}.get(client, [])
    told = ("trainer.train()", "trainer.train()\ntrainer.save_state()"), ("logging_steps=2", "logging_steps=1")
    run(client, config, tmp_path, script=changed(client, tmp_path, *more, *told))
    logged = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    losses = {row["step"]: row["loss"] for row in logged if "loss" in row}
    curve = of(tmp_path)["seen"]["loss_curve"]
    assert curve and [loss for _, loss in curve] == pytest.approx([losses[step] for step, _ in curve], rel=1e-4)


@there("transformers")
@pytest.mark.parametrize(
    "config", ["fsdp_bf16", "tp_bf16", "fsdp_fp8_msamp_o2", pytest.param("fsdp_tp_bf16", marks=pytest.mark.slow)]
)
def test_the_trainer_loads_the_best_model_and_saves_it_for_its_library(tmp_path, config):
    from transformers import LlamaForCausalLM

    options = {"save_only_model": True} if config == "tp_bf16" else {}
    train(config, tmp_path / "run", script=functools.partial(keeps_the_best, tmp_path, **options))
    first, last = (load_file(tmp_path / "out" / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert not best_is_saved(tmp_path)
    assert saved.keys() == first.keys() and (tmp_path / "out" / "checkpoint-1" / "config.json").is_file()
    for name, weight in first.items():
        assert saved[name].equal(weight) and not last[name].equal(weight), name
    for rank in range(2) if "fp8" not in config else ():
        assert all(weight.equal(first[name]) for name, weight in torch.load(tmp_path / f"rank{rank}.pt").items())
    if config == "tp_bf16":  # each process would go on with the main process's part of the optimizer
        assert IN_PARTS + ": pass save_only_model=True or save_strategy='no'" in refused(config, tmp_path)
        (tmp_path / "out" / "checkpoint-1" / OPTIMIZER).touch()  # of a ddp config, say
        line = refused(config, tmp_path, resumes=True, **options)
        assert f"{OPTIMIZER}: {IN_PARTS}: begin anew" in line


def refused(config, folder, **options):
    script = functools.partial(keeps_the_best, folder, **options)
    log = refusal(config, folder / "-".join(("again", *options)), script=script)
    assert log.count("refused: ") == 1
    return log


@pytest.mark.slow
@there("transformers")
def test_checkpoints_with_the_model_only_need_whole_weights(tmp_path):
    log = refused("fsdp_bf16", tmp_path, save_only_model=True, load_best_model_at_end=False)
    assert "set fsdp_state_dict_type: FULL_STATE_DICT" in log


def test_two_models_and_optimizers_prepared_one_by_one_are_sharded(tmp_path):
    log = run("gan", "fsdp_bf16", tmp_path)
    made = of(tmp_path)
    each = [made["evidence"], *made["evidence_of_other_models"]]
    assert [one["sharded"] and one["optimizer_owns_all"] for one in each] == [True, True]
    assert all(one["bytes_per_parameter"]["total"] == 16 for one in each), "the optimizers hold shards"
    assert log.count("sharded as one piece") == 2


@there("diffusers")
@pytest.mark.parametrize("config", ["single_fp8_msamp_o2", "ddp_fp8_msamp_o3"])
def test_averages_of_coded_weights_are_of_their_values(tmp_path, config):
    """The script itself compares torch's, timm's and diffusers' averages with the weights: codes are 2**10 times off."""
    run("averages", config, tmp_path)


@there("diffusers")
@pytest.mark.parametrize("config", ["fsdp_bf16", pytest.param("hsdp_bf16", marks=pytest.mark.slow),
                                    pytest.param("fsdp_fp8_msamp_o2", marks=pytest.mark.slow)])  # fmt: skip
def test_averages_of_sharded_weights_are_of_whole_weights(tmp_path, config):
    """The copies were made before `prepare`. The script compares one average with its own, from gathered weights."""
    run("averages", config, tmp_path)
    assert of(tmp_path)["evidence"]["sharded"]


@pytest.mark.slow
@there("sentence_transformers")
@pytest.mark.parametrize("client", ["sentences", "sentences_cross"])
def test_sentence_transformers_saves_under_fsdp2_what_it_loads(tmp_path, client):
    """For the model card the main process alone runs an example through the model, of which each holds a part."""
    import sentence_transformers

    run(client, "fsdp_bf16", tmp_path)
    kind = "CrossEncoder" if client == "sentences_cross" else "SentenceTransformer"
    loaded = getattr(sentence_transformers, kind)(str(tmp_path / "out" / "weights"), device="cpu").state_dict()
    first, last = (load_file(tmp_path / "out" / folder / "model.safetensors") for folder in ("bert0", "weights"))
    layers = [name for name in first if "layer" in name and name.endswith("weight")]
    assert first.keys() == last.keys() and len(layers) == 16
    for name in layers:
        [value] = [value for key, value in loaded.items() if key.endswith(name)]
        assert value.equal(last[name]) and not value.equal(first[name]), name
    card = (tmp_path / "out" / "weights" / "README.md").read_text()
    assert ("# [0." if kind == "CrossEncoder" else "# tensor([[1.0000, ") in card, "the example was not computed"


@there("denoising_diffusion_pytorch")
def test_an_average_by_the_main_process_alone_is_refused_where_weights_are_sharded(tmp_path):
    quick = {"COLLECTIVE_TIMEOUT": "10"}
    log = run("diffusion", "fsdp_bf16", tmp_path, code={1, 2}, wins=True, more=quick)  # rank 1 sees that rank 0 is gone
    line = "refused: the main process alone calls EMA.update, but each process holds a part of the weights"
    assert log.count(line) == 1 and "Traceback" not in log


@there("diffusers")
@pytest.mark.slow
@there("diffusers")
def test_averages_of_deepspeeds_weights_are_refused_in_one_line(tmp_path):
    log = run("averages", "zero2_bf16", tmp_path, code=2)
    line = "refused: under zero2 DeepSpeed holds the weights in 16 bit"
    assert log.count(line) == 1 and "use a ddp" in log and "Traceback" not in log


def test_an_average_by_hand_of_sharded_weights_is_refused_in_one_line(tmp_path):
    by_hand = (
        "    optimizer.zero_grad()\n",
        """    optimizer.zero_grad()
    with torch.no_grad():
        for mine, weight in zip(copied.parameters(), model.parameters(), strict=True):
            mine.lerp_(weight, 0.1)
""",
    )
    prepared = "model, optimizer, loader, schedule = accelerator.prepare("
    before = (prepared, f"import copy\ncopied = copy.deepcopy(model)\n{prepared}")
    log = run("own_loop", "fsdp_bf16", tmp_path, code=2, script=changed("own_loop", tmp_path / "mine", by_hand, before))
    line = "refused: the script computes with sharded weights and whole tensors together"
    assert log.count(line) == 1 and "use a ddp" in log and "Traceback" not in log


@pytest.mark.parametrize(
    ("script", "config", "line"),
    [
        ("test_ops", "ddp_fp32", None),
        pytest.param("test_sync", "ddp_fp32", "no model and optimizer were prepared", marks=pytest.mark.slow),
        pytest.param(
            "test_distributed_data_loop", "ddp_fp32", "join_uneven_inputs without even batches", marks=pytest.mark.slow
        ),
        pytest.param(
            "test_script", "single_fp32", "mixed_precision='bf16', the config says fp32", marks=pytest.mark.slow
        ),
        pytest.param("test_script", "ddp_fp32", "mixed_precision='bf16', the config says fp32", marks=pytest.mark.slow),
        ("test_merge_weights", "ddp_fp32", "the script passes fsdp_plugin"),
    ],
)
def test_accelerates_own_scripts_run_or_are_refused_in_one_line(tmp_path, script, config, line):
    """`line`: what they are refused with, None where they run to their end. Each tries several things, and test_script
    gets as far as training in bf16 under an fp32 config."""
    path = Path(accelerate.test_utils.__file__).parent / "scripts" / f"{script}.py"
    log = run(script, config, tmp_path, code=2 if line else 0, script=path)
    assert "Traceback" not in log and log.count("refused: ") == bool(line) and (line or "testing") in log
    assert script != "test_script" or "Training yielded the same results on one CPU or distributed setup" in log


def test_a_checkpoint_by_the_main_process_alone_is_written_and_said(tmp_path):
    alone = ("    if step == 7:\n", "    if step == 7 and accelerator.is_main_process:\n")
    log = run("own_loop", "ddp_bf16", tmp_path, script=changed("own_loop", tmp_path, alone))
    assert log.count("note: the main process alone calls save_state") == 1
    assert checkpoints.unsound(tmp_path / "out" / "checkpoint-4") is None
    assert {rank["weights"] for rank in told(tmp_path)} == {told(tmp_path)[0]["weights"]}
    made = of(tmp_path)
    assert any("steps a prepared scheduler 2 times" in line for line in made["notes"]) and len(made["notes"]) == 2
    assert made["seen"]["samples_per_step"] == 16, "two micro-batches of four, on two processes"


def test_a_save_of_shards_by_the_main_process_alone_is_followed_or_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_sync, "LOOKS", 0.1), monkeypatch.setattr(rank_sync, "STANDS", 2)
    alone = ("    if step == 7:\n", "    if step == 7 and accelerator.is_main_process:\n")
    run("own_loop", "fsdp_bf16", tmp_path, script=changed("own_loop", tmp_path, alone))
    assert checkpoints.unsound(tmp_path / "out" / "checkpoint-4") is None
    hidden = (alone[0], "    main = accelerator.is_main_process\n    if step == 7 and main:\n")
    (tmp_path / "hidden").mkdir()
    log = run("own_loop", "fsdp_bf16", tmp_path / "hidden", code={1, 2}, script=changed("own_loop", tmp_path, hidden))
    assert "refused: the main process alone calls save_state" in log and "Traceback" not in log


def test_which_scripts_save_on_the_main_process_alone(tmp_path):
    block = "if {}:\n    if step:\n        self.accelerator.save_state('x')\nelse:\n    accelerator.save_state('y')\n"
    alone = ("accelerator.is_main_process", "step and self.accelerator.is_main_process")
    alone += ("state.is_local_main_process", "accelerator.process_index == 0", "is_main_process")
    alone += ("accelerator.is_main_process or accelerator.distributed_type == DistributedType.DEEPSPEED",)
    others = ("accelerator.is_main_process or sharded", "not accelerator.is_main_process", "step", "no Python")
    for test in (*alone, *others):
        (tmp_path / "script.py").write_text(block.format(test))
        assert saves_alone(tmp_path / "script.py") == (test in alone), test
    before = (
        'net = accelerator.unwrap_model(model)\npipeline = Pipeline.from_pretrained("x", unet=unwrap_model(unet))\n'
    )
    calls = {
        'net.save_pretrained("x")': True,
        'a.save_state("x")': True,
        'pipeline.save_pretrained("x")': True,
        'tokenizer.save_pretrained("x"), schedule.state_dict()': False,
        'torch.save(unwrap_model(model).state_dict(), "x")': True,
        'net.save_pretrained("x", state_dict=whole)': False,
        "save_checkpoint(folder, model=accelerator.unwrap_model(model))": True,
        "layers = get_peft_model_state_dict(net)": True,
        "net.config.save_pretrained(folder)": False,
    }
    for call, saves in calls.items():
        (tmp_path / "script.py").write_text(f"{before}if accelerator.is_main_process:\n    {call}\n{call}\n")
        assert saves_alone(tmp_path / "script.py") == saves, call
    (tmp_path / "script.py").write_text(
        "@accelerator.on_main_process\ndef save():\n    accelerator.save_model(net, 'x')\n"
    )
    assert saves_alone(tmp_path / "script.py")


def test_what_a_script_passes_against_its_config_is_refused_or_left_out_and_said(tmp_path):
    script = changed("gan", tmp_path, ("Accelerator()", "Accelerator(mixed_precision='fp16', split_batches=False)"))
    log = run("gan", "single_bf16", tmp_path, code=2, script=script)
    assert "refused: the script passes mixed_precision='fp16', the config says bf16" in log
    assert "launch with --config_wins" in log and "Traceback" not in log
    log = run("gan", "single_bf16", tmp_path, wins=True, script=script)
    assert "note: the script passes mixed_precision='fp16', the config says bf16: the config wins" in log
    assert of(tmp_path)["evidence"]["dtypes"]["linear_output"] == "bfloat16"


@there("transformers")
def test_deepspeed_in_training_arguments_is_the_configs_to_say(tmp_path):
    """It would be set up, on a CPU with a minute of compiling, before an Accelerator is made."""

    def script():
        from transformers import TrainingArguments

        door.take_its_place()
        file = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
        TrainingArguments(sys.argv[2], report_to=[], deepspeed=file)

    for config in ("zero2_bf16", "ddp_bf16"):
        log = refusal(config, tmp_path / config, script=script)
        assert log.count("refused: the script passes deepspeed to TrainingArguments") == 1


def test_nothing_is_added_to_a_scripts_arithmetic(tmp_path):
    """With dropout and a shuffled loader: the same random numbers are drawn, too."""
    script = changed("own_loop", tmp_path, ("nn.GELU()", "nn.GELU(), nn.Dropout(0.1)"))
    results = []
    for words, name in (((), "plain"), (("-m", "faithful"), "ours")):
        folder = tmp_path / name
        folder.mkdir()
        done = launched(sys.executable, *words, script, folder, cwd=tmp_path,
                        env={"PYTHONPATH": f"{ROOT}:{CLIENTS}", "OMP_NUM_THREADS": "1"})  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads((folder / "rank0.json").read_text()))
    assert results[0] == results[1]


@pytest.mark.slow
@there("transformers")
def test_what_a_run_says_is_said_once(tmp_path):
    """Nothing of torchao or of memory that cannot be pinned, in any process; notes and what was counted only once."""
    noted = ("import sys\n", "import signal, sys\n\nsignal.signal(signal.SIGTERM, print)\n")
    script = changed("classifier", tmp_path, noted)
    script = script.rename(script.with_name("bert.py"))
    done = launched("./launch.sh", "ddp_bf16", script, tmp_path,
                    env={"FAITHFUL_PROJECT_DIR": str(tmp_path / "run"), "PYTHONPATH": str(CLIENTS)})  # fmt: skip
    made, lines = record(tmp_path / "run"), (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0 and made["notes"]
    assert not [line for line in lines if "Enum subclass" in line or "pin_memory" in line]
    for line in (*made["notes"], made["evidence"]["measured"].removesuffix(" | rehearsal on a CPU"), "finished: "):
        assert sum(line in said for said in lines) == 1, line
    assert "compare ddp_bf16" not in done.stdout, "this is no recipe"


def test_an_error_in_the_middle_of_a_run_is_shown(tmp_path):
    """torch.distributed collects what is written while an exception is shown, to show it afterwards."""
    script = changed("gan", tmp_path, ("if step == 6:", "if step == 2:\n        1 / 0\n    if step == 6:"))
    done = launched("./launch.sh", "ddp_bf16", script, tmp_path,
                    env={"FAITHFUL_PROJECT_DIR": str(tmp_path / "run"), "PYTHONPATH": str(CLIENTS)})  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "ZeroDivisionError" in line]
    assert done.returncode and errors[0] in [f"[rank{rank}]: ZeroDivisionError: division by zero" for rank in (0, 1)]
    assert "-m faithful" in done.stdout.splitlines()[0], "it does not import faithful: launch.sh sees to it"
    assert record(tmp_path / "run")["error"] == "ZeroDivisionError: division by zero"
