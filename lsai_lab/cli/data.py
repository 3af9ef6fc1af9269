"""`lsai data`: see, fetch and prepare the text that training reads."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.config.train import DataConfig
from lsai_lab.cli.options import JsonOption
from lsai_lab.data.dataset import Dataset, data_root, find_datasets, read_meta
from lsai_lab.data.prepare import KINDS
from lsai_lab.data.prepare import prepare as prepare_dataset
from lsai_lab.data.speakleash import base_url, get_manifest, list_names

app = typer.Typer(no_args_is_help=True)

RootOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for downloads and datasets. [default: $LSAI_DATA, else data/ in the checkout]"
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
    print("sources")
    for kind, what in KINDS.items():
        print(f"  {kind:22} {what}")
    print(f"\nprepared datasets in {place / 'datasets'}" + ("" if found else ": none"))
    for name, meta in found.items():
        size, tokens = (
            sum(split[key] for split in meta["splits"].values()) for key in ("bytes", "tokens")
        )
        print(
            f"  {name:45} {size / 1e6:,.1f} MB, {tokens:,} tokens, vocabulary "
            f"{meta['tokenizer']['vocab_size']}"
        )
    if speakleash:
        print(f"\nSpeakleash ({base_url()}); `lsai data info speakleash:<name>` shows one")
        for name in offered["speakleash"]:
            print(f"  speakleash:{name}")


@app.command()
def prepare(
    source: Annotated[
        str, typer.Argument(help="stdlib, polish-docs, speakleash:<name> or file:<path or glob>.")
    ],
    vocab_size: Annotated[int, typer.Option(help="Size of the BPE vocabulary.")] = 10_000,
    max_mb: Annotated[float | None, typer.Option(help="Use at most this much text (MB).")] = None,
    root: RootOption = None,
) -> None:
    """Fetch a source, train its tokenizer and write the token files; quick if that has been done
    before.

    Example: lsai data prepare stdlib --max-mb 5
    """
    values = {"source": source, "vocab_size": vocab_size, "max_mb": max_mb}
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


def _show(dataset: Dataset) -> None:
    meta = dataset.meta
    print(f"dataset     {dataset.folder}")
    print(
        f"source      {meta['config']['source']}  {json.dumps(meta['source'], ensure_ascii=False)}"
    )
    print(f"tokenizer   {meta['tokenizer']['kind']}, {dataset.vocab_size} tokens")
    for split, facts in meta["splits"].items():
        size = (
            f"{facts['documents']:>9,} documents {facts['bytes'] / 1e6:>9,.2f} MB "
            f"{facts['tokens']:>13,} tokens"
        )
        print(f"{split:11} {size}  {facts['bytes_per_token']:.2f} bytes/token")
