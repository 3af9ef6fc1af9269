"""`lsai data`: see, fetch and prepare the text that training reads."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.config.train import LARGEST_VOCABULARY, DataConfig
from lsai_lab.cli.options import JsonOption
from lsai_lab.cli.tables import say, table
from lsai_lab.data.dataset import Dataset, data_root, find_datasets, read_meta
from lsai_lab.data.prepare import KINDS
from lsai_lab.data.prepare import prepare as prepare_dataset
from lsai_lab.data.speakleash import base_url, get_manifest, list_names

app = typer.Typer(no_args_is_help=True)

RootOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for downloads and datasets. (default: $LSAI_DATA, else data/ in the checkout)"
    ),
]


@app.command("list")
def list_(
    root: RootOption = None,
    speakleash: Annotated[
        bool, typer.Option("--speakleash", help="Also list what Speakleash offers.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Sources, and the datasets that are prepared here. Example: lsai data list --speakleash"""
    place, offered = root or data_root(), {"speakleash": list_names()} if speakleash else {}
    found = {folder.name: read_meta(folder) for folder in find_datasets(place)}
    if as_json:
        return print(
            json.dumps(
                {"sources": KINDS, "datasets": found, **offered}, indent=1, ensure_ascii=False
            )
        )
    prepared = ", ".join(found and [f"{len(found)} in {place / 'datasets'}"]) or "none"
    print(f"prepared datasets: {prepared}")
    if found:
        print(table([_row(name, meta) for name, meta in found.items()], full=True))
    print("\nsources, for `lsai data prepare SOURCE` and `--dataset SOURCE`")
    for kind, what in KINDS.items():
        say(f"  {kind:22} {what}", " " * 25)
    if speakleash:
        print(f"\nSpeakleash ({base_url()}); `lsai data info speakleash:<name>` shows one")
        for name in offered["speakleash"]:
            print(f"  speakleash:{name}")


@app.command(
    help="Fetch a source, train its tokenizer and write the token files; quick if that has been "
    "done before.\n\n"
    "Example: lsai data prepare stdlib --max-mb 5\n\n"
    "Files: .txt .md .text (cut into documents), .jsonl .ndjson (a JSON record a line), .json (the "
    "same, or one array), "
    ".csv, any of them also .gz or .zst, and .parquet. --column names the text of a record; nulls "
    "are left out.\n\n"
    "Tokens: .npy files of one row of integers, with --vocab-size or --tokenizer: "
    "lsai data prepare 'tokens:*.npy' --vocab-size 50257\n\n"
    "A run takes the same as settings: --dataset SOURCE, --set data.column=body, --set "
    "data.tokenizer=FOLDER with "
    "--set data.vocab_size and --set model.vocab_size of its size."
)
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="stdlib, polish-docs, debian-docs, speakleash:<name>, file:<path or glob>, "
            "tokens:<path or glob>."
        ),
    ],
    column: Annotated[
        str | None, typer.Option(help="Field or column of the text in file:. (default: text)")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="A tokenizer.json, or a folder with one, instead of a BPE trained on the text."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Size of the vocabulary, at most 262144. (default: 10000, or the tokenizer's)"
        ),
    ] = None,
    max_mb: Annotated[float | None, typer.Option(help="Use at most this much text (MB).")] = None,
    root: RootOption = None,
) -> None:
    if (
        source.partition(":")[0] == "tokens"
        and source != "tokens:"
        and tokenizer is None
        and vocab_size is None
    ):
        raise UserError(
            f"{source}: say how many tokens there are, with --vocab-size, or which, with "
            f"--tokenizer"
        )
    largest = LARGEST_VOCABULARY if tokenizer else None
    given = {
        "column": column,
        "vocab_size": largest if vocab_size is None else vocab_size,
        "tokenizer": tokenizer,
        "max_mb": max_mb,
    }
    values = {"source": source} | {key: value for key, value in given.items() if value is not None}
    config = validated(DataConfig, values, "lsai data prepare")
    _show(prepare_dataset(config, root or data_root()))


@app.command()
def info(
    name: Annotated[
        str, typer.Argument(help="A prepared dataset (folder or its name), or speakleash:<name>.")
    ],
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a prepared dataset holds (its files are verified), or what Speakleash says about one of
    its own.

    Example: lsai data info speakleash:plwiki
    """
    if name.startswith("speakleash:"):
        return print(
            json.dumps(get_manifest(name.removeprefix("speakleash:")), indent=1, ensure_ascii=False)
        )
    folders = find_datasets(root or data_root())
    matches = [
        folder for folder in folders if folder.name == name or folder.name.endswith(f"-{name}")
    ]
    if not matches and not Path(name).is_dir():
        known = ", ".join(folder.name for folder in folders) or "none"
        raise UserError(f"no prepared dataset {name!r} in {root or data_root()}; there is: {known}")
    dataset = Dataset(matches[0] if matches else Path(name))
    if as_json:
        return print(json.dumps(dataset.meta, indent=1, ensure_ascii=False))
    _show(dataset)


def _row(name: str, meta: dict[str, Any]) -> dict[str, Any]:
    """A prepared dataset's line in the list."""
    size, tokens = (
        sum(split.get(key, 0) for split in meta["splits"].values()) for key in ("bytes", "tokens")
    )
    return {
        "name": name,
        "MB": f"{size / 1e6:,.1f}" if size else "",
        "tokens": f"{tokens:,}",
        "vocabulary": meta["tokenizer"]["vocab_size"],
    }


def _show(dataset: Dataset) -> None:
    meta = dataset.meta
    print(f"dataset     {dataset.folder}")
    print(
        f"source      {meta['config']['source']}  {json.dumps(meta['source'], ensure_ascii=False)}"
    )
    print(f"tokenizer   {meta['tokenizer']['kind']}, {dataset.vocab_size} tokens")
    for split, facts in meta["splits"].items():
        text = ""
        if "bytes" in facts:
            size = f"{facts['documents']:>9,} documents {facts['bytes'] / 1e6:>9,.2f} MB"
            text, rate = f"{size} ", f"  {facts['bytes_per_token']:.2f} bytes/token"
        print(f"{split:11} {text}{facts['tokens']:>13,} tokens{rate if text else ''}")
    if left_out := meta.get("left_out"):
        print(
            "left out    "
            + ", ".join(f"{count:,} {what} texts" for what, count in left_out.items())
        )
