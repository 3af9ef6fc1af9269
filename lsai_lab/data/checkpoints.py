"""The tokenizer of a checkpoint: written beside an exported model, compared with the data's where a
run begins from weights."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_json
from lsai_lab.data.dataset import Dataset
from lsai_lab.data.tokenizer import TOKENIZER, TOKENIZER_CONFIG, load_tokenizer

COMPARED = 50_000  # tokens of the validation split


def write_tokenizer(dataset: Dataset, folder: Path) -> None:
    """Write the data's tokenizer so that `transformers.AutoTokenizer.from_pretrained(folder)` reads
    it.

    Nothing is written for tokens that came without one.
    """
    if TOKENIZER not in dataset.meta["files"]:
        return
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(dataset.folder / TOKENIZER, folder / TOKENIZER)
    end = dataset.meta["tokenizer"]["end_of_text"]["token"]
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / TOKENIZER_CONFIG, facts)


def require_same_tokenizer(dataset: Dataset, checkpoint: Path) -> None:
    """UserError if the tokenizer in the folder `checkpoint` gives the data's own text other ids
    than the data's tokenizer.

    Where one of the two has no tokenizer there is nothing to compare.
    """
    path = checkpoint / TOKENIZER
    if TOKENIZER not in dataset.meta["files"] or not path.is_file():
        return
    if path.read_bytes() == (dataset.folder / TOKENIZER).read_bytes():
        return
    ours, theirs, end = (
        dataset.tokenizer(),
        load_tokenizer(path),
        dataset.meta["tokenizer"]["end_of_text"],
    )
    tokens = dataset.tokens("validation")[:COMPARED]
    text = ours.decode(tokens[tokens != end["id"]].tolist(), skip_special_tokens=False)
    same = _ids(ours, text) == _ids(theirs, text) and theirs.token_to_id(end["token"]) == end["id"]
    if not same:
        size = max(theirs.get_vocab(with_added_tokens=True).values()) + 1
        raise UserError(
            f"init_from: {path} makes other tokens than the tokenizer of {dataset.folder.name}, so "
            f"its weights know other "
            f"words; set data.tokenizer={checkpoint} and data.vocab_size={size}"
        )


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids
