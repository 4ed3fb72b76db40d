"""What save_model writes beside the weights: configs that libraries load, the model card, and the push to the Hub."""

import base64
import http.server
import json
import threading

import pytest
import timm
import torch
import transformers
from conftest import ROOT, edited, launched, record, refusal, train, weights
from huggingface_hub import ModelCard

from faithful import __main__ as door
from faithful.errors import Refused
from faithful.saving import beside, card, hub
from shared import args, resnets, vision

SHORT = ("--max_steps", 1, "--eval_steps", 0)
TEXTS = ("--dataset", ROOT / "shared", "--sequence_length", 16)
LOADED = [  # recipe, config, options, the library's class
    ("vit", "fsdp_fp8", (), "timm"),
    ("gpt", "single_bf16", TEXTS, transformers.AutoModelForCausalLM),
    pytest.param("resnet", "ddp_bf16", ("--image_size", 64), "timm", marks=pytest.mark.slow),
    pytest.param("vit", "single_fp8_msamp_o2", ("--model", "test_vit", "--image_size", 160, "--per_device_train_batch_size", 4), "timm", marks=pytest.mark.slow),
    pytest.param("bert", "zero2_bf16", ("--sequence_length", 16), transformers.AutoModelForSequenceClassification, marks=pytest.mark.slow),
    pytest.param("embed", "fsdp_fp8", ("--sequence_length", 16), transformers.AutoModel, marks=pytest.mark.slow),
    pytest.param("dpo", "fsdp_fp8", ("--sequence_length", 64), transformers.AutoModelForCausalLM, marks=pytest.mark.slow),
    pytest.param("sft", "fsdp_bf16", ("--skip_long", "--sequence_length", 48), transformers.AutoModelForCausalLM, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "options", "library"), LOADED)
def test_its_library_loads_the_folder(tmp_path, name, config, options, library):
    folder = train(config, tmp_path / "run", *SHORT, *options, name=name) / "model"
    if library == "timm":
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        about = json.loads((tmp_path / "run" / "data.json").read_text())
        assert model.pretrained_cfg["input_size"] == (about["in_chans"], about["image_size"], about["image_size"])
        assert [*model.pretrained_cfg["mean"]] == about["mean"] and "license" not in model.pretrained_cfg
        inner = transformers.AutoModelForImageClassification.from_pretrained(folder).timm_model
        assert all(torch.equal(values, model.state_dict()[key]) for key, values in inner.state_dict().items())
    else:
        model = library.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert model.config.architectures == [type(model).__name__]
        if model.can_generate():
            assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    saved, loaded = weights(tmp_path / "run"), model.state_dict()
    assert all(torch.equal(loaded[key].float(), values.float()) for key, values in saved.items())
    data = ModelCard.load(folder / "README.md").data
    assert data.library_name == ("timm" if library == "timm" else "transformers")
    assert data.pipeline_tag or name == "embed"  # transformers has none for an encoder without a head
    assert {result.metric_type: result.metric_value for result in data.eval_results} == record(tmp_path / "run")[
        "final"
    ]["metrics"]
    assert record(tmp_path / "run")["evidence"]["measured"].replace("|", "\\|") in (folder / "README.md").read_text()


def test_a_model_that_timm_cannot_make_has_no_config(tmp_path):
    """A residual network for small images has another stem than timm's."""
    folder = train("single_fp32", tmp_path / "run", *SHORT, name="resnet") / "model"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.safetensors"]
    text = (folder / "README.md").read_text()
    assert "load_state_dict" in text and "library_name" not in text


SAME = [("vit_nano", 8, 1, vision.vit), ("vit_tiny", 64, 3, vision.vit), ("resnet_nano", 64, 3, resnets.resnet)]


@pytest.mark.parametrize(("name", "size", "channels", "make"), SAME)
def test_timm_s_model_computes_what_the_run_s_does(tmp_path, name, size, channels, make):
    from safetensors.torch import save_file

    model = make(name, size, channels, 10).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    facts = {
        "mean": [0.4] * channels,
        "std": [0.2] * channels,
        "image_size": size,
        "in_chans": channels,
        "classes": [*"abcdefghij"],
    }
    (tmp_path / "data.json").write_text(json.dumps(facts))
    assert beside.write(model, tmp_path, tmp_path / "data.json") == beside.Saved(
        type(model).__name__, "timm", "image-classification"
    )
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.rand(2, channels, size, size)
    assert torch.equal(model(images), again(images)) and again.pretrained_cfg["label_names"] == facts["classes"]
    assert again.pretrained_cfg["crop_pct"] == 1.0


NASTY = "a|b`c``\n---\n# big\x1b[2J <script> ../../etc \u202e"


def a_record(**changes):
    plan = {"strategy": "ddp", "num_processes": 2, "precision": "bf16", "level": None, "rehearsal": True}
    return {
        "recipe": "mine", "command": "python /home/me/secret/train.py --data=/home/me/d", "args": {}, "plan": plan,
        "config": {"name": None, "text": None}, "evidence": None, "notes": [], "final": None, "device_name": "cpu",
        "seen": {"optimizer": None, "samples_per_step": None, "loss_curve": []}, "finished": "now", "versions": {},
        "git_commit": None, "git_dirty": None,
    } | changes  # fmt: skip


def test_names_of_anyone_change_no_other_line_of_the_card():
    texts = {"recipe": NASTY, "command": f"{NASTY}\n```\n# out", "notes": [NASTY], "device_name": NASTY,
             "config": {"name": NASTY, "text": f"a: 1\n```\n# {NASTY}\n````"}, "versions": {NASTY: NASTY},
             "args": {"dataset": NASTY, "model": NASTY, "pretrained": True}, "final": {"step": 1, "metrics": {NASTY: 0.5}}}  # fmt: skip
    harmless = {"recipe": "a", "command": "b", "notes": ["c"], "device_name": "d", "config": {"name": "e", "text": "f"},
                "versions": {"g": "h"}, "args": {"dataset": "i", "model": "j", "pretrained": True}, "final": {"step": 1, "metrics": {"k": 0.5}}}  # fmt: skip
    shapes = []
    for changes in (texts, harmless):
        text = card.text(a_record(**changes), beside.Saved(NASTY, None, None))
        data = ModelCard(text).data
        assert data.base_model is None and data.datasets is None and len(data.eval_results) == 1
        body = text.split("\n---\n", 1)[1]
        assert "\x1b" not in text and "\u202e" not in text
        outside, fence = [], None
        for line in body.split("\n"):
            ticks = len(line) - len(line.lstrip("`"))
            if fence is None and ticks >= 3:
                fence = ticks
            elif fence is not None:
                fence = None if ticks >= fence and line.strip("`") == "" else fence
            else:
                outside.append(line[:2] + ("|" if line.endswith("|") else ""))
        assert fence is None
        shapes.append(outside)
    assert shapes[0] == shapes[1]
    assert data.eval_results[0].dataset_name == "i"


def test_a_card_names_no_folder_of_the_machine():
    notes = ["resumed from /home/me/secret/runs/a", "see https://pytorch.org/docs/x"]
    text = card.text(a_record(notes=notes, args={"dataset": "/home/me/secret/pets"}), beside.Saved("Net"))
    assert "secret" not in text and "/home" not in text.replace("huggingface.co", "")
    assert "`pets`" in text and "https://pytorch.org/docs/x" in text and "python train.py --data=d" in text


def test_what_is_on_the_hub_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"dataset": "uoft-cs/cifar10", "model": "timm/vit", "pretrained": True}
    data = ModelCard(
        card.text(a_record(args=given), beside.Saved("Net", "timm", "image-classification"), "me/net")
    ).data
    assert (data.datasets, data.base_model) == (["uoft-cs/cifar10"], "timm/vit")
    (tmp_path / "uoft-cs" / "cifar10").mkdir(parents=True)
    assert ModelCard(card.text(a_record(args=given), beside.Saved("Net"))).data.datasets is None


def test_a_card_of_the_user_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    card.write(tmp_path, a_record(), beside.Saved("Net"), None)
    assert (tmp_path / "README.md").read_text() == "mine"
    (tmp_path / "README.md").write_text(f"{card.MARK}\nof an earlier run")
    card.write(tmp_path, a_record(), beside.Saved("Net"), None)
    assert "`mine`" in (tmp_path / "README.md").read_text()


# ---- the Hub ----


class FakeHub(http.server.ThreadingHTTPServer):
    """As much of the Hub as a push needs, on loopback. asked: [(method, path, body)]. broken: the end of the paths that
    it answers with an error."""

    def __init__(self, broken="never"):
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked, self.broken, self.files = [], broken, {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def env(self):
        address = f"http://127.0.0.1:{self.server_address[1]}"
        return {"HF_ENDPOINT": address, "HF_TOKEN": "hf_" + "x" * 20, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def answered(self):
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append((self.command, self.path, body))
        address, code = hub.env["HF_ENDPOINT"], 200
        if self.path.endswith(hub.broken):
            code, answer = 403, {"error": "the Hub\nsays no"}
        elif "/repos/create" in self.path:
            answer = {"url": f"{address}/me/{json.loads(body)['name'].split('/')[-1]}", "name": "me/x"}
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {
                "files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]
            }
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {
                "commitUrl": f"{address}/me/net/commit/1",
                "commitOid": "1",
                "success": True,
                "pullRequestUrl": None,
            }
        else:
            answer = {"name": "me", "type": "user", "id": "me/net", "sha": "1", "siblings": []}
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_HEAD = answered


def pushed(tmp_path, config, env, *options):
    command = (
        "accelerate",
        "launch",
        "--main_process_port",
        "0",
        "--config_file",
        f"accelerate_configs/{config}.yml",
        "recipes/vit.py",
    )
    options = ("--push_to_hub", *map(str, (*SHORT, "--output_dir", tmp_path / "run", *options)))
    return launched(*command, *options, env={"HF_HOME": str(tmp_path / "home")} | env)


@pytest.mark.slow
def test_one_process_pushes_the_finished_model(tmp_path):
    fake = FakeHub()
    done = pushed(tmp_path, "ddp_bf16", fake.env, "--hub_model_id", "me/net", "--hub_private_repo")
    assert done.returncode == 0, done.stdout + done.stderr
    made = [json.loads(body) for _, path, body in fake.asked if path.endswith("/repos/create")]
    assert [(each["name"], each["organization"], each["visibility"]) for each in made] == [("net", "me", "private")]
    assert sum("/commit/" in path for _, path, _ in fake.asked) == 1
    assert f"pushed: {fake.env['HF_ENDPOINT']}" in done.stdout
    assert {*fake.files} == {"README.md", "config.json", "model.safetensors"}
    assert fake.files["model.safetensors"] == (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert b'timm.create_model("hf-hub:me/net"' in fake.files["README.md"]
    assert fake.env["HF_TOKEN"] not in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.slow
def test_a_push_that_fails_loses_nothing(tmp_path):
    done = pushed(tmp_path, "single_fp32", FakeHub("/commit/main").env, "--hub_model_id", "me/net")
    assert done.returncode == 0, done.stdout + done.stderr
    model = tmp_path / "run" / "model"
    [line] = [line for line in done.stdout.splitlines() if "was not pushed" in line]
    assert line.startswith(f"warning: {model} was not pushed to me/net (") and line.endswith(
        f"hf upload me/net {model}"
    )
    assert record(tmp_path / "run")["status"] == "finished" and (model / "model.safetensors").is_file()


def test_where_nothing_can_be_pushed_nothing_is_trained(tmp_path):
    log = refusal("single_fp32", tmp_path / "run", *SHORT, "--push_to_hub")
    assert "refused: --push_to_hub to run: HF_HUB_OFFLINE is set" in log
    assert "step 1" not in log and not (tmp_path / "run" / "model").exists()


REFUSED = [  # environment, offline, token, what the Hub answers, the line
    ({}, True, "hf_x", None, "--push_to_hub to run: HF_HUB_OFFLINE is set"),
    ({}, False, None, None, "needs a token of the Hugging Face Hub"),
    ({hub.NAME: "a b/c"}, False, "hf_x", None, "--push_to_hub to a b/c: Repo id must .*: check --hub_model_id and the token"),
    ({}, False, "hf_x", OSError("no\nroute"), "OSError: no: check --hub_model_id"),
]  # fmt: skip


@pytest.mark.parametrize(("env", "offline", "token", "answer", "line"), REFUSED)
def test_what_cannot_be_pushed_is_refused_before_training(tmp_path, monkeypatch, env, offline, token, answer, line):
    for key, value in {hub.ASKED: "True", **env}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    if answer:
        monkeypatch.setattr("huggingface_hub.create_repo", lambda *_, **__: (_ for _ in ()).throw(answer))
    with pytest.raises(Refused, match=line) as refused:
        hub.repository(tmp_path / "run")
    assert "\n" not in str(refused.value)


def test_nothing_is_pushed_unless_asked(tmp_path, monkeypatch):
    monkeypatch.delenv(hub.ASKED, raising=False)
    assert hub.repository(tmp_path) is None


def test_a_copy_without_faithful_says_that_it_does_not_push(monkeypatch, capsys):
    monkeypatch.delitem(args.sys.modules, "faithful")
    monkeypatch.setenv("FAITHFUL_PUSH_TO_HUB", "")
    with pytest.raises(SystemExit):
        args.parse(args.Run, ["--push_to_hub"])
    assert "--push_to_hub: not with Accelerate's own Accelerator" in capsys.readouterr().err


def test_a_script_that_does_not_know_faithful_gets_the_weights_alone(tmp_path):
    """`-m faithful`: it may have a README.md of its own, and compares nothing."""
    text = edited(
        (ROOT / "recipes" / "vit.py").read_text(),
        "from faithful import Accelerator",
        "from accelerate import Accelerator",
    )
    (tmp_path / "shared").symlink_to(ROOT / "shared")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "vit.py").write_text(text)
    script = tmp_path / "recipes" / "vit.py"
    run = train("single_fp32", tmp_path / "run", *SHORT, script=script, before=lambda rank: door.take_its_place())
    assert record(run)["status"] == "finished"
    assert [path.name for path in (tmp_path / "run" / "model").iterdir()] == ["model.safetensors"]


def test_a_config_that_cannot_be_written_is_a_note_and_the_card_is_there(tmp_path):
    """As of TransformerEngine's blocks, a function that timm's config cannot hold."""

    def before(rank):
        made = vision.timm.create_model

        def of_own_blocks(name, *args, **kwargs):
            return made(name, *args, block_fn=lambda *a, **k: timm.models.vision_transformer.Block(*a, **k), **kwargs)

        vision.timm.create_model = of_own_blocks

    folder = train("single_fp32", tmp_path / "run", *SHORT, before=before) / "model"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.safetensors"]
    [note] = [line for line in record(tmp_path / "run")["notes"] if "config.json" in line]
    assert note.startswith(f"{folder}/config.json is not written: Model argument 'block_fn' is not serializable")
