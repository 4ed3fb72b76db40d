"""Data sets that `datasets` loads, from the Hub, a folder or files: loading, splitting, labels."""

import numpy as np

from shared.args import Refused, short


def load(name, offline, *args, **kwargs):
    """`datasets.load_dataset`, with all its types of errors as one line. offline: names that need no network."""
    import datasets

    try:
        return datasets.load_dataset(*args, **kwargs)
    except Exception as error:
        error = error.__cause__ if "while generating" in str(error) and error.__cause__ else error
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Refused(f"--dataset {name}: {reason} (known offline: {offline}; else a folder or a Hub name)") from None


def column(split, key, name):
    """All values of a column. `datasets` finds text that is not UTF-8 only here."""
    try:
        return split[key][:]
    except UnicodeDecodeError as error:
        raise Refused(
            f"--dataset {name}: column {key} holds text that is not UTF-8: byte {error.object[error.start]:#x} after "
            f"{short(error.object[: error.start].decode()[-30:])!r}; convert it, or leave that row out"
        ) from None


def split_of(loaded, name):
    """Returns (training split, held-out split). A tenth of the training split is held out if there is no other."""
    train = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    held_out = next((loaded[split] for split in ("test", "validation") if split in loaded), None)
    if held_out is None:
        if len(train) < 2:
            raise Refused(f"--dataset {name} has {len(train)} samples: too few to hold some out")
        both = train.train_test_split(test_size=0.1, seed=0)
        train, held_out = both["train"], both["test"]
    return train, held_out


def refuse_labels_out_of_range(name, split, column):
    """Raises Refused for labels out of range. Hub sets use -1 for samples without a label, which a loss cannot take."""
    labels, count = np.array(split[column][:], float), split.features[column].num_classes  # None becomes nan
    wrong = np.flatnonzero(~((labels >= 0) & (labels < count)))
    if count < 2:
        raise Refused(f"--dataset {name} has {count} class: classification needs two or more")
    if len(wrong):
        first = split[column][int(wrong[0])]
        raise Refused(
            f"--dataset {name}: {len(wrong)} labels are out of range, the first is {first} at index {wrong[0]} of "
            f"{split.split or 'a split'}; there are classes 0 to {count - 1}"
        )
