"""Copies a recipe with all it needs, and nothing else, into a folder of its own.

    ./launch.sh copy vit ddp_fp8_msamp_o2 ../my-project
    ./launch.sh copy vit ddp_bf16 ../my-project --plain

writes recipes/vit.py, the modules of shared/ that it imports, the YAML, pinned requirements, a test that trains two
steps, and a README of ten lines.
faithful and amp8 stand beside them in this project's wheel, which the requirements name and which has these commands.
With --plain the recipe imports Accelerate's own Accelerator, and needs neither. The modules are found by reading the
imports, including those inside functions.
"""

import ast
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from faithful.config.config_file import BESIDE  # noqa: E402
from faithful.config.settings import Settings, read_env, to_env  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import cli, find, progress  # noqa: E402

# Packages whose name differs from the import, and packages that another one needs without declaring it.
PACKAGES = {"sklearn": ["scikit-learn"], "PIL": ["pillow"], "yaml": ["pyyaml"], "timm": ["timm", "torchvision"],
            "skimage": ["scikit-image"], "transformer_engine": ["transformer-engine"],
            "huggingface_hub": ["huggingface-hub"]}  # fmt: skip
OPTIONAL = {"skimage", "transformer_engine", "deepspeed", "peft", "triton"}  # what needs one of them asks for it
IMPORT, PLAIN_IMPORT = "from faithful import Accelerator  # noqa: E402", "from accelerate import Accelerator"
PLAIN = {("single", "fp32"), ("single", "bf16"), ("ddp", "fp32"), ("ddp", "bf16")}  # trains the same: test_plain.py
NOT_PLAIN = {("diffusion", "ddp")}  # on CPUs, Accelerate wraps a model that is not trained in DDP, which refuses it


@functools.cache
def imports(path: Path) -> list[str]:
    """The dotted names of all imports in a Python file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def modules(name: str, plain: bool) -> list[Path]:
    """Our files that an import of this dotted name needs; of faithful all, as the config decides which it uses."""
    package, *rest = name.split(".")
    if package == "faithful" and not plain:
        return sorted((BESIDE / "faithful").rglob("*.py"))
    if package != "shared":
        return []
    module = ROOT / "shared" / f"{rest[0]}.py" if rest else None
    return [ROOT / "shared" / "__init__.py"] + ([module] if module and module.is_file() else [])


def needed(recipe: Path, plain: bool = False) -> tuple[list[Path], set[str]]:
    """Returns (our files that `recipe` needs, packages that any of them imports). plain: without faithful."""
    files, seen = [recipe], set()
    for path in files:  # which grows
        for name in imports(path):
            package = name.split(".")[0]
            if (key := name if package == "shared" else package) not in seen:
                seen.add(key)
                files += [file for file in modules(name, plain) if file not in files]
    packages = {key.split(".")[0] for key in seen}
    return files, packages - {"shared", "faithful", "amp8"} - sys.stdlib_module_names


def pins(packages: set[str]) -> str:
    """The pins of these packages from requirements.txt, without hashes. pip installs what they depend on."""
    text = (ROOT / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==([^ ;\\\n]+)", text, re.M))
    names = {name for package in packages - OPTIONAL for name in PACKAGES.get(package, [package])}
    return "".join(f"{name}=={pinned[name]}\n" if name in pinned else f"{name}\n" for name in sorted(names))


def wheel(folder: Path) -> str:
    """Builds this project's wheel in `folder`, from a clone or from what pip has installed. Returns its name. Nothing
    is downloaded."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [(path, ROOT) for pattern in patterns["accelerate_recipes"] for path in ROOT.glob(pattern)]
    files += [(path, BESIDE) for name in ("faithful", "amp8") for path in (BESIDE / name).rglob("*.py")]
    with tempfile.TemporaryDirectory() as source:
        for path, base in files:
            to = source / path.relative_to(base)
            cli.make_folder(to.parent)
            shutil.copyfile(path, to)
        build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
        command = [sys.executable, "-c", build, str(folder.resolve())]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Refused(f"the wheel of faithful and amp8 cannot be built ({reason}): install setuptools>=77")
    return done.stdout.split()[-1]


def refuse_plain(recipe: str, name: str, wanted: Settings) -> None:
    """Raises Refused unless Accelerate alone does what the config asks for with this recipe."""
    kind = wanted.strategy, wanted.precision
    if kind not in PLAIN or wanted.compile:
        raise Refused(
            f"--plain is for single and ddp in fp32 and bf16, where Accelerate alone trains the same; {name} is "
            f"{' '.join(kind)}{' compiled' if wanted.compile else ''}: leave --plain out"
        )
    if (recipe, wanted.strategy) in NOT_PLAIN:
        raise Refused(
            f"--plain does not take {recipe} with {name}: on a CPU Accelerate alone fails under {wanted.strategy} "
            "for a model that is not trained, as its average of weights: take a single config, or leave --plain out"
        )


def copy(recipe: str, config: str, destination: Path, plain: bool = False) -> list[Path]:
    """Writes `destination`. Returns the relative paths written."""
    source = find.recipe(recipe)
    yml, mapping = find.sound_config(config)
    wanted = read_env(to_env(mapping))
    if plain:
        refuse_plain(source.stem, yml.name, wanted)
    if destination.exists() and any(destination.iterdir()):
        raise Refused(f"{destination} is there and not empty: choose a new folder")
    cli.make_folder(destination)
    files, packages = needed(source, plain)
    written = []
    for path in [*(path for path in files if not path.is_relative_to(BESIDE / "faithful")), yml]:
        base = next((base for base in (ROOT, BESIDE) if path.resolve().is_relative_to(base)), None)
        at = path.resolve().relative_to(base) if base else Path("accelerate_configs", path.name)
        cli.make_folder((destination / at).parent)
        shutil.copyfile(path, destination / at)
        written.append(at)
    if plain:
        page = destination / "recipes" / source.name
        page.write_text(page.read_text().replace(IMPORT, PLAIN_IMPORT))
    built = None if plain else wheel(destination)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    engine = extras[wanted.rules.package] if wanted.rules.package else []
    more = [*engine, *([f"./{built}"] if built else [])]
    (destination / "requirements.txt").write_text(pins(packages) + "".join(f"{line}\n" for line in more))
    (destination / "README.md").write_text(readme(source, yml, destination, built, wanted.strategy))
    (destination / "test_copy.py").write_text(smoke_test(source, yml, plain, wanted.strategy))
    made = ["requirements.txt", "README.md", "test_copy.py", *([built] if built else [])]
    return sorted([*written, *map(Path, made)])


def smoke_test(source: Path, yml: Path, plain: bool, strategy: str) -> str:
    """A test of the copy. Without a GPU, plain ddp needs a variable (see `readme`)."""
    launch = f"-m accelerate.commands.launch --config_file accelerate_configs/{yml.name}"
    launch += "" if strategy == "single" else " --main_process_port 0"
    system, torch, env = "", "", ""
    if plain and strategy == "ddp":
        system, torch = "import os\n", "\nimport torch\n"
        env = '\nENV = os.environ | ({} if torch.accelerator.is_available() else {"ACCELERATE_USE_CPU": "true"})'
    return f'''"""Two steps of the recipe under its config, on any machine: python test_copy.py, or pytest."""

{system}import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
{torch}
LAUNCH = "{launch}".split(){env}


def test_two_steps():
    with TemporaryDirectory() as folder:
        words = [sys.executable, *LAUNCH, "recipes/{source.name}", "--max_steps", "2", "--output_dir", folder]
        assert subprocess.run(words, cwd=Path(__file__).resolve().parent{", env=ENV" * bool(env)}).returncode == 0
        assert Path(folder, "model", "model.safetensors").is_file()


if __name__ == "__main__":
    test_two_steps()
'''


def readme(source: Path, yml: Path, destination: Path, built: str | None, strategy: str) -> str:
    what = ast.get_docstring(ast.parse(source.read_text())).splitlines()[0]  # pyrefly: ignore[missing-attribute]
    where = f"`{built}` has its Accelerator"
    command, without_gpu = f"accelerate launch --config_file accelerate_configs/{yml.name} recipes/{source.name}", ""
    if not built:
        where = "Its Accelerator is Accelerate's own: nothing checks that a run is what the YAML says"
    if not built and strategy == "ddp":  # `use_cpu: true` in the YAML gives runs of one process each, in one folder
        without_gpu = f"\n    ACCELERATE_USE_CPU=true {command}  # without a GPU"
    text = (
        f"`recipes/{source.name}` says what is trained, the YAML says how. `shared/` has its data and models. {where}. "
        f"`python recipes/{source.name} --help` lists the options; each run writes a folder in `runs/`."
    )
    return f"""# {destination.resolve().name}

{what} Copied from accelerate-recipes; all of it is yours to change.

    python3 -m venv .venv && source .venv/bin/activate  # or: uv venv, and below uv pip install
    pip install -r requirements.txt
    python test_copy.py  # trains two steps
    {command}{without_gpu}

{textwrap.fill(text, 100)}
"""


def main(argv: list[str]) -> None:
    parser = cli.parser("copy", __doc__)
    parser.add_argument("recipe", help=f"its name, as {find.COMMAND} ls lists it")
    parser.add_argument("config", help="its name, or the path of a YAML file")
    parser.add_argument("destination", type=Path, help="a folder that is not there yet, or empty")
    parser.add_argument("--plain", action="store_true", help="Accelerate's own Accelerator, without faithful")
    args = parser.parse_args(argv)
    try:
        with progress.waiting("copies, and builds the wheel"):
            written = copy(args.recipe, args.config, args.destination, args.plain)
    except OSError as error:
        raise Refused(str(error)) from None
    to_read = [path for path in written if path.suffix != ".whl" and (args.destination / path).stat().st_size]
    lines = sum(len((args.destination / path).read_text().splitlines()) for path in to_read)
    built = "".join(f" and {path}" for path in written if path.suffix == ".whl")
    print(f"{args.destination}: {len(to_read)} files, {lines:,} lines{built}. Next: its README.md")


if __name__ == "__main__":
    cli.run(main)
