"""The plan of the study, as docs/study.md fixes it: what is trained, and in which ways."""

from dataclasses import dataclass

BASELINE, CONTROL = "bf16", "control"
SEEDS = 5
PICTURE = "words"  # the task that the one picture shows
RARE = 50  # a token is rare with fewer occurrences in the training text


@dataclass
class Way:
    """A way to train: config and options. script: in place of the task's recipe. note: what a table says of it."""

    config: str
    options: tuple = ()
    script: str | None = None
    note: str = ""


WAYS = {
    "bf16": Way("single_bf16"),
    "control": Way("single_bf16", note="bf16 from weights one rounding apart"),
    "o2": Way("single_fp8_msamp_o2"),
    "planted": Way("single_fp8_msamp_o2", script="benchmarks/planted/lossy/gpt.py", note="O2 with a planted defect"),
    "o2_nearest": Way("single_fp8_msamp_o2", script="benchmarks/planted/nearest/gpt.py", note="O2 rounded to nearest"),
    "fp32": Way("single_fp32"),
    "ao": Way("single_fp8"),
    "o1": Way("single_fp8_msamp_o1"),
    "o3": Way("single_fp8_msamp_o3"),
    "bf16_pure": Way("single_fp32", ("--dtype", "bfloat16"), note="bf16 weights, AdamW's moments in bf16"),
    "bf16_stochastic": Way("single_fp32", ("--dtype", "bfloat16", "--optimizer", "adamw_bf16"),
                           note="bf16 weights, rounded stochastically"),
    "adamw_8bit": Way("single_bf16", ("--optimizer", "adamw_8bit")),
    "adafactor": Way("single_bf16", ("--optimizer", "adafactor")),
    "muon": Way("single_bf16", ("--optimizer", "muon")),
    "ao_rowwise": Way("single_fp8_ao_rowwise"),
    "te": Way("single_fp8_te"),
    "te_current": Way("single_fp8_te_current"),
    "te_block": Way("single_fp8_te_block"),
    "fp16": Way("single_fp16"),
    "te_mxfp8": Way("single_fp8_te_mxfp8", note="needs a Blackwell GPU"),
}  # fmt: skip
ABSENT = {
    "nvfp4": "no config of this project has it",
    "bitsandbytes": "its 8-bit Adam needs a GPU, and no recipe has it",
}


@dataclass
class Task:
    """A training. measure: the main one. margin: two values that differ by less are equal. seconds: of one bf16 run on
    one core of the machine that planned it, for `left`."""

    question: str
    recipe: str
    options: tuple
    measure: str
    margin: float
    seconds: int
    data: str | None = None  # a name in DATA
    start: str | None = None  # a name in STARTS: the run that is fine-tuned


def language(*options):
    return ("--eval_steps", "0", "--save_steps", "0", "--logging_steps", "10", *options)


SMALL = ("--model", "llama_nano", "--sequence_length", "64", "--per_device_train_batch_size", "8")
TASKS = {
    "words": Task(
        "A vocabulary with rare words", "gpt",
        language(*SMALL, "--vocab_size", "4096", "--max_steps", "600"), "weights_loss", 0.005, 60, "source"),
    "accumulation": Task(
        "32 micro-batches in each step", "gpt",
        language("--model", "llama_nano", "--sequence_length", "64", "--per_device_train_batch_size", "4",
                 "--gradient_accumulation_steps", "32", "--max_steps", "60"), "weights_loss", 0.005, 60, "source"),
    **{
        f"finetune_{rate}": Task(
            f"Fine-tuning at a learning rate of {rate}", "gpt",
            language("--pretrained", *SMALL[2:], "--max_steps", "300", "--warmup_steps", "10", "--learning_rate", rate),
            "gain", 0.05, 25, "code", "prose")
        for rate in ("1e-3", "1e-4", "1e-5", "1e-6")
    },
    "vit": Task(
        "Pre-training on photos", "vit",
        ("--dataset", "photos", "--model", "vit_nano", "--per_device_train_batch_size", "16", "--max_steps", "1000",
         "--eval_steps", "0", "--save_steps", "0"), "eval_loss", 0.005, 45),
    "gpt": Task(
        "A longer pre-training: 4.0M parameters, 3,000 steps", "gpt",
        language("--model", "llama_tiny", *SMALL[2:], "--max_steps", "3000"), "weights_loss", 0.005, 300, "source"),
}  # fmt: skip
# Text of Python's standard library: {name: characters}.
DATA = {"source": 2_000_000, "code": 300_000}
STARTS = {"prose": ("single_fp32", "gpt", language(*SMALL, "--dataset", "python_docs", "--max_steps", "3000"))}
