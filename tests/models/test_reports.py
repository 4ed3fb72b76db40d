"""Scripts of public reports train what plain torch trains, or are refused in one line; results/reports.json has more."""

import pytest
from reports import REPORTS, outcomes

QUICK = ["two_backwards", "discard clip", "partial swap", "head_read custom", "tied rename", "native tp_size"]


@pytest.mark.parametrize("config", ["ddp_bf16", pytest.param("zero2_bf16", marks=pytest.mark.slow)])
def test_a_script_of_a_report_is_right_or_refused(tmp_path, config):
    found = list(outcomes(QUICK, config, tmp_path))
    assert [row["name"] for row in found] == QUICK
    assert {row["outcome"] for row in found} <= {"right", "refused"}, found


def test_fsdp2_trains_a_model_that_returns_a_dict_of_another_class(tmp_path):
    """torch's FSDP2 looks for tensors in what a model returns, and averages no gradient where it finds none."""
    [found] = outcomes(["user_dict"], "fsdp_bf16", tmp_path)
    assert found["outcome"] == "right", found


def test_ddp_refuses_it_where_it_looks_for_unused_parameters(tmp_path, monkeypatch):
    monkeypatch.setitem(REPORTS, "found", REPORTS["user_dict"] | {"found": True})
    [found] = outcomes(["found"], "ddp_bf16", tmp_path)
    assert found["outcome"] == "refused" and "ddp_find_unused_parameters=False" in found["line"], found


@pytest.mark.parametrize("config", ["fsdp_bf16", "zero3_bf16"])
def test_the_trainer_saves_and_keeps_its_best_model(tmp_path, config):
    [found] = outcomes(["best_hf"], config, tmp_path)
    assert found["outcome"] == "right", found
