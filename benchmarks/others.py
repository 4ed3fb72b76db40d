"""Scripts of others: where each comes from, and its arguments for the small data and models of benchmarks/tiny.py.

None is part of this project. Those with a `repository` are read from a folder of checkouts, FOLDER/owner/name:

    git clone https://github.com/huggingface/diffusers FOLDER/huggingface/diffusers

Those with a `module` are part of an installed package.
"""

import hashlib
import subprocess

TRAINER = """--max_steps 3 --per_device_train_batch_size 4 --logging_steps 1 --save_strategy no --report_to none
    --learning_rate 1e-3 --dataset_name answers --seed 3 --no_gradient_checkpointing
    --model_name_or_path HuggingFaceTB/SmolLM-360M --dtype float32 --bf16 False --output_dir OUT"""
GENERATED = " --num_generations 2 --max_completion_length 6 --reward_funcs rewards.letters"
DIFFUSION = """--pretrained_model_name_or_path stable-diffusion --resolution 64 --train_batch_size 2 --max_train_steps 3
    --learning_rate 1e-3 --lr_warmup_steps 0 --seed 3 --output_dir OUT"""
ACCELERATE, DIFFUSERS, PEFT = "huggingface/accelerate", "huggingface/diffusers", "huggingface/peft"


def by_feature(name, *words):
    return {"repository": ACCELERATE, "path": f"examples/by_feature/{name}.py", "words": words}


def diffusion(path, words, base=DIFFUSION):
    return {"repository": DIFFUSERS, "path": f"examples/{path}.py", "words": (base + " " + words).split()}


OTHERS = {
    "trl_dpo": {"module": "trl.scripts.dpo", "words": TRAINER.split()},
    "trl_grpo": {
        "module": "trl.scripts.grpo",
        "words": (TRAINER.replace("answers", "prompts") + GENERATED).split(),
    },
    "trl_reward": {"module": "trl.scripts.reward", "words": TRAINER.split()},
    "gradient_accumulation": by_feature("gradient_accumulation", "--gradient_accumulation_steps", "2"),
    "checkpointing": by_feature("checkpointing", "--checkpointing_steps", "epoch", "--output_dir", "OUT"),
    "cross_validation": by_feature("cross_validation", "--num_folds", "2"),
    "memory": by_feature("memory"),
    "tracking": by_feature("tracking", "--project_dir", "OUT"),
    "local_sgd": by_feature("local_sgd", "--local_sgd_steps", "2"),
    "ddp_comm_hook": by_feature("ddp_comm_hook", "--ddp_comm_hook", "bf16"),
    "autoregressive_accumulation": by_feature(
        "gradient_accumulation_for_autoregressive_models", "--gradient_accumulation_steps", "2"
    ),
    "complete_nlp": {
        "repository": ACCELERATE,
        "path": "examples/complete_nlp_example.py",
        "words": "--checkpointing_steps epoch --with_tracking --output_dir OUT --project_dir OUT/logs".split(),
    },
    "text_to_image": diffusion(
        "text_to_image/train_text_to_image",
        "--train_data_dir digits/train --use_ema --checkpointing_steps 2 --gradient_accumulation_steps 2",
    ),
    "text_to_image_lora": diffusion(
        "text_to_image/train_text_to_image_lora", "--train_data_dir digits/train --rank 4 --checkpointing_steps 2"
    ),
    "unconditional": diffusion(
        "unconditional_image_generation/train_unconditional",
        """--train_data_dir digits/train --model_config_name_or_path small-unet --resolution 32 --train_batch_size 4
        --num_epochs 1 --save_images_epochs 9 --use_ema --ddpm_num_inference_steps 2 --ddpm_num_steps 20
        --eval_batch_size 2 --lr_warmup_steps 0 --output_dir OUT""",
        base="",
    ),
    "dreambooth": diffusion(
        "dreambooth/train_dreambooth",
        "--instance_data_dir instances/train --instance_prompt thedog --train_text_encoder --checkpointing_steps 2",
    ),
    "textual_inversion": diffusion(
        "textual_inversion/textual_inversion",
        "--train_data_dir instances/train --placeholder_token <it> --initializer_token a --learnable_property object",
    ),
    "controlnet": diffusion("controlnet/train_controlnet", "--train_data_dir pairs --checkpointing_steps 2"),
    "peft_prompts": {
        "repository": PEFT,
        "path": "examples/sequence_classification/peft_no_lora_accelerate.py",
        "words": "--model_name_or_path bert-base-cased --peft_type p_tuning --num_train_epochs 1 --seed 3 "
        "--num_virtual_tokens 4 --num_warmup_steps 0 --output_dir OUT".split(),
    },
    "peft_seq2seq": {
        "repository": PEFT,
        "path": "examples/conditional_generation/peft_lora_seq2seq_accelerate_fsdp.py",
        "words": (),
        "not": ("ddp",),  # it calls save_pretrained of what DDP returns, which has none
    },
    "clm": {  # run_clm_no_trainer.py of transformers, with more of DeepSpeed
        "repository": ACCELERATE,
        "path": "examples/by_feature/deepspeed_with_config_support.py",
        "words": """--train_file train.txt --validation_file validation.txt --model_name_or_path gpt2 --block_size 32
        --max_train_steps 4 --gradient_accumulation_steps 2 --per_device_train_batch_size 4 --seed 3
        --learning_rate 1e-3 --checkpointing_steps 2 --with_tracking --report_to tensorboard
        --output_dir OUT""".split(),
    },
}


def meant_for(name, config):
    """Whether the script can run with what the config's strategy makes of a model, under Accelerate too."""
    return not config.startswith(OTHERS.get(name, {}).get("not", ("nothing",)))


def command(name, checkouts):
    """What `python` starts: a path, or `-m` and a module. Raises FileNotFoundError for a checkout that is not there."""
    entry = OTHERS[name]
    if "module" in entry:
        return ["-m", entry["module"]]
    path = checkouts / entry["repository"] / entry["path"]
    if not path.is_file():
        raise FileNotFoundError(path)
    return [path]


def origin(name, checkouts):
    """For the row of results: which script of whom it was."""
    entry = OTHERS[name]
    if "module" in entry:
        return {"module": entry["module"]}
    folder = checkouts / entry["repository"]
    commit = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    digest = hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest()
    return {"repository": entry["repository"], "path": entry["path"], "commit": commit, "sha256": digest}
