"""Copies a recipe with all it needs, and nothing else, into a folder of its own.

    ./launch.sh copy vit ddp_fp8_msamp_o2 ../my-project

writes recipes/vit.py, the modules of shared/ that it imports, faithful/, amp8/ if the config can need it, the YAML,
pinned requirements, and a README of ten lines. It finds the modules by reading the imports, including those inside
functions.
"""

import ast
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from faithful import config as configs  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import cli, find  # noqa: E402

# Packages whose name differs from the import, and packages that another one needs without declaring it.
PACKAGES = {"sklearn": ["scikit-learn"], "PIL": ["pillow"], "yaml": ["pyyaml"], "timm": ["timm", "torchvision"],
            "skimage": ["scikit-image"], "transformer_engine": ["transformer-engine"],
            "huggingface_hub": ["huggingface-hub"]}  # fmt: skip
OPTIONAL = {"skimage", "transformer_engine", "deepspeed"}  # the one dataset or config that needs them asks for them


def imports(path):
    """The dotted names of all imports in a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(name):
    """Our files that an import of this dotted name needs; of faithful all, as the config decides which it uses."""
    package, *rest = name.split(".")
    if package == "faithful":
        return sorted((ROOT / "faithful").rglob("*.py"))
    if package != "shared":
        return []
    module = ROOT / "shared" / f"{rest[0]}.py" if rest else None
    return [ROOT / "shared" / "__init__.py"] + ([module] if module and module.is_file() else [])


def needed(recipe):
    """Returns (our files that `recipe` needs, packages that any of them imports)."""
    files, packages, queue = [], set(), [recipe]
    while queue:
        path = queue.pop()
        if path in files:
            continue
        files.append(path)
        for name in imports(path):
            queue += modules(name)
            package = name.split(".")[0]
            if package not in {"shared", "faithful", "amp8"} | sys.stdlib_module_names:
                packages.add(package)
    return files, packages


def pins(packages):
    """The pins of these packages from requirements.txt, without hashes. pip installs what they depend on."""
    text = (ROOT / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==([^ ;\\\n]+)", text, re.M))
    names = [name for package in packages - OPTIONAL for name in PACKAGES.get(package, [package])]
    return "".join(f"{name}=={pinned[name]}\n" if name in pinned else f"{name}\n" for name in sorted(names))


def copy(recipe, config, destination):
    """Writes `destination`. Returns the relative paths written."""
    source = find.recipe(recipe)
    yml, mapping = find.sound_config(config)
    if destination.exists() and any(destination.iterdir()):
        raise Refused(f"{destination} is there and not empty: choose a new folder")
    files, packages = needed(source)
    wanted = configs.read_env(configs.to_env(mapping))
    if wanted["precision"] == "fp8":  # MS-AMP's levels, or FP8 where there is no GPU
        files += sorted((ROOT / "amp8").glob("*.py"))
    written = []
    for path in [*files, *(ROOT / "faithful").rglob("*.md"), yml]:
        inside = path.resolve().is_relative_to(ROOT)
        at = path.resolve().relative_to(ROOT) if inside else Path("accelerate_configs", path.name)
        (destination / at).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination / at)
        written.append(at)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    engine = extras["deepspeed"] if wanted["strategy"].startswith("zero") else []
    (destination / "requirements.txt").write_text(pins(packages) + "".join(f"{line}\n" for line in engine))
    (destination / "README.md").write_text(readme(source, yml, destination, "amp8" in {p.parts[0] for p in written}))
    return sorted([*written, Path("requirements.txt"), Path("README.md")])


def readme(source, yml, destination, with_amp8):
    what = ast.get_docstring(ast.parse(source.read_text())).splitlines()[0]
    return f"""# {destination.resolve().name}

{what} Copied from accelerate-recipes; all of it is yours to change.

    pip install -r requirements.txt
    accelerate launch --config_file accelerate_configs/{yml.name} recipes/{source.name}

`recipes/{source.name}` says what is trained, the YAML says how. `shared/` has its data and models, `faithful/` its
Accelerator{", `amp8/` its FP8" if with_amp8 else ""}.
`python recipes/{source.name} --help` lists the options; each run writes `runs/`.
"""


def main(argv):
    parser = cli.parser("copy", __doc__)
    parser.add_argument("recipe", help="its name, as ./launch.sh ls lists it")
    parser.add_argument("config", help="its name, or the path of a YAML file")
    parser.add_argument("destination", type=Path, help="a folder that is not there yet, or empty")
    args = parser.parse_args(argv)
    try:
        written = copy(args.recipe, args.config, args.destination)
    except OSError as error:
        raise Refused(str(error)) from None
    lines = sum(len((args.destination / path).read_text().splitlines()) for path in written)
    print(f"{args.destination}: {len(written)} files, {lines:,} lines. Next: its README.md")


if __name__ == "__main__":
    cli.run(main)
