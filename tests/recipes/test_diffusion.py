"""recipes/diffusion.py: the transformer, flow matching, the average of weights, pictures and their measures."""

import pytest
import torch
from conftest import distance, metrics, record, resumed, train, weights
from PIL import Image
from safetensors.torch import load_file

from shared import data, diffusion, images
from shared.args import Refused
from tools import cli, export, predict

STEPS = ("--max_steps", 6, "--eval_steps", 3, "--save_steps", 3, "--logging_steps", 1, "--warmup_steps", 1)


def small():
    torch.manual_seed(0)
    return diffusion.DiffusionTransformer(8, 1, 2, width=32, depth=2, heads=2, patch_size=2)


def test_patches_go_back_to_their_places():
    model = small()
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(4.0))  # weights are zero: each patch becomes 0, 1, 2, 3
    out = model(torch.randn(3, 1, 8, 8), torch.rand(3), torch.zeros(3, dtype=torch.long))
    assert torch.equal(out, torch.tensor([[0.0, 1.0], [2.0, 3.0]]).repeat(4, 4).expand(3, 1, 8, 8))


def test_sampling_follows_the_velocity_to_the_image():
    target, noise = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
    labels = torch.tensor([0, 1])
    drawn = diffusion.sample(lambda images, times, labels: target - noise, noise, labels, 2, steps=7)
    torch.testing.assert_close(drawn, target, rtol=0, atol=1e-5)
    assert diffusion.losses(lambda *_: target - noise, target, labels, noise, torch.rand(2)).max() == 0


def test_guidance_goes_on_from_no_class_to_the_class():
    def velocity(images, times, labels):
        return labels.view(-1, 1, 1, 1).float().expand_as(images)  # 0 for class 0, 2 for no class

    noise, labels = torch.zeros(1, 1, 2, 2), torch.tensor([0])
    assert diffusion.sample(velocity, noise, labels, 2).max() == 0
    drawn = diffusion.sample(velocity, noise, labels, 2, guidance=3)
    torch.testing.assert_close(drawn, torch.full_like(noise, 2 + 3 * (0 - 2)))


def test_it_learns_which_class_is_bright():
    model, labels = small(), torch.tensor([0, 1]).repeat(16)
    batch = {"pixel_values": (2.0 * labels - 1).view(-1, 1, 1, 1).expand(-1, 1, 8, 8), "labels": labels}
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(150):
        loss = diffusion.train_losses(model, batch, 2, 0.1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drawn = diffusion.sample(model, torch.randn(2, 1, 8, 8), torch.tensor([0, 1]), 2, steps=25)
    means = drawn.mean((1, 2, 3))
    assert means[0] < -0.7 and means[1] > 0.7, means


def test_measures_tell_good_images_from_wrong_classes_and_from_one_image(tmp_path):
    train_set, held_out = images.digits()

    class Main:
        is_main_process, device = True, torch.device("cpu")

    samples = diffusion.Samples(train_set, tmp_path, 1.0)
    chosen = [held_out.labels.eq(label).nonzero().flatten()[: diffusion.EACH] for label in range(10)]
    real = held_out.pixels[torch.cat(chosen)]
    found = {}
    for name, drawn in {
        "real": real,
        "wrong classes": real.roll(diffusion.EACH, 0),
        "always the same": real[:: diffusion.EACH].repeat_interleave(diffusion.EACH, 0),
    }.items():

        def velocity(at, times, labels, drawn=drawn):
            return (drawn - at) / (1 - times[0])  # to the drawn images, wherever it is

        found[name] = samples.measures(Main, velocity, 1)
    assert found["real"]["accuracy"] > 0.9 and 0.8 < found["real"]["diversity"] < 1.2
    assert found["wrong classes"]["accuracy"] < 0.1
    assert found["always the same"]["diversity"] == pytest.approx(0, abs=1e-3)
    assert Image.open(tmp_path / "samples-1.png").size == (8 * (32 + 2) + 2, 10 * (32 + 2) + 2)


def test_an_image_has_the_same_held_out_loss_in_every_batch():
    model, (_, held_out) = small(), images.digits()
    torch.nn.init.normal_(model.head.weight)
    pixels, labels = held_out.pixels[:6], held_out.labels[:6] % 2
    whole = diffusion.held_out_losses(model, pixels, labels)
    parts = [diffusion.held_out_losses(model, pixels[at], labels[at]) for at in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("config", ["ddp_bf16", pytest.param("fsdp_fp8_msamp_o2", marks=pytest.mark.slow)])
def test_the_saved_model_is_the_average_and_a_resumed_run_the_same_run(tmp_path, config):
    whole = train(config, tmp_path / "whole", *STEPS, "--save_total_limit", 3, name="diffusion")
    part = resumed(config, whole, *STEPS, without="*-6*", name="diffusion")
    assert (part / "samples-6.png").read_bytes() == (whole / "samples-6.png").read_bytes()
    plain = train(config, tmp_path / "plain", *STEPS, "--eval_steps", 0, "--ema_decay", 0, name="diffusion")
    losses = [[row["loss"] for row in metrics(run) if "loss" in row] for run in (whole, plain)]
    assert losses[0] == losses[1], "the average changes the training"
    assert distance(whole, plain) > 0


def test_the_average_is_that_of_its_formula():
    model, average = small(), small()
    expected = {name: value.clone() for name, value in average.state_dict().items()}
    for step in range(1, 40):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        diffusion.update(average, model, step, 0.6)
        decay = min(0.6, (1 + step) / (10 + step))
        expected = {name: decay * value + (1 - decay) * model.state_dict()[name] for name, value in expected.items()}
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value, expected[name])


def test_predict_draws_and_export_writes_the_same_model(tmp_path, capsys):
    run = train("single_fp8_msamp_o2", tmp_path / "run", *STEPS, "--eval_steps", 0, name="diffusion")
    predict.main([str(run), "--classes", "3", "7"])
    assert "8 images of each of 3, 7" in capsys.readouterr().out
    assert Image.open(run / "predict.png").size == (8 * 34 + 2, 2 * 34 + 2)
    export.main([str(run)])
    assert load_file(run / "export.safetensors").keys() == weights(run).keys()
    assert set(data.about(images.digits()[0])) <= set(record(run)["args"] | export.load(run)[1]["data"])
    for argv, reason in (("--classes", "11"), "has no class 11"), (("--prompt", "a"), "draws images"):
        with pytest.raises(SystemExit) as end:
            cli.run(lambda _, argv=argv: predict.main([str(run), *argv]))
        assert end.value.code == 2 and reason in capsys.readouterr().err


def test_models_and_sizes_that_are_not_there():
    with pytest.raises(Refused, match="no model 'dit_big': one of dit_nano"):
        diffusion.dit("dit_big", 8, 1, 10)
    with pytest.raises(Refused, match="image size 50 is not a multiple of the patch size 4"):
        diffusion.dit("dit_nano", 50, 1, 10)
