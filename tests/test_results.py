"""What README.md says was measured is what the files of results/ hold."""

import json

from conftest import ROOT

TEXT = (ROOT / "README.md").read_text()


def result(name):
    found = json.loads((ROOT / "results" / f"{name}.json").read_text())
    assert found["command"].startswith("python benchmarks/") and found["device"] and found["date"] and found["versions"]
    assert f"results/{name}.json" in TEXT
    return found


def test_photos():
    rows = result("photos")["rows"]
    assert {row["recipe"] for row in rows} == {"vit", "resnet"}
    for row in rows:
        assert (
            f"| `{row['recipe']}` | {row['steps']} | {row['accuracy']:.4f} | {row['balanced_accuracy']:.4f} |" in TEXT
        )
        assert row["accuracy"] >= 0.85


def test_gpt_knows_more_than_a_3_gram():
    found = result("gpt_python_docs")
    assert found["gpt"]["loss"] < found["ngram_loss"]["3"]
    assert f"{found['gpt']['loss']:.4f}" in TEXT and f"{found['ngram_loss']['3']:.4f}" in TEXT


def test_pretrained_beats_scratch_at_the_same_budget():
    found = result("finetune_textures")
    rows = {row["start"]: row for row in found["rows"]}
    assert all(len(row["accuracy"]) == 3 for row in found["rows"])
    assert min(rows["pretrained"]["accuracy"]) > max(rows["from scratch"]["accuracy"])
    for row in found["rows"]:
        assert f"| {row['start']} | {row['mean']:.4f} | {row['spread']:.4f} |" in TEXT.replace("`", "")
    assert (ROOT / "results" / "finetune_textures.svg").is_file()


def test_latency_of_exported_models():
    for row in result("onnx_latency")["rows"]:
        cells = (row["model"], row["engine"], row["dtype"], f"{row['bytes'] / 1e6:.2f}", f"{row['apart']:.0e}")
        times = (f"{row['milliseconds_batch_1']:.2f}", f"{row['milliseconds_batch_32']:.1f}")
        assert f"| {' | '.join((*cells, *times))} |" in TEXT.replace("`", "")
        assert row["apart"] < (1e-4 if row["dtype"] == "float32" else 0.1)
