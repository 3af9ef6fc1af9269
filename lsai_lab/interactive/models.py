"""The model that a run trained, and what it writes."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from lsai_core.base.errors import UserError
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part
from lsai_core.model.hf import load_hf, max_positions
from lsai_core.model.transformer import Transformer
from lsai_lab.data.tokenizer import TOKENIZER, TOKENIZER_CONFIG, eos_token, load_tokenizer
from lsai_lab.report.load import AnyRun, folder_of
from lsai_lab.runs.find import opened

_EXPORT = "overrides={'checkpoint.export': True}, or --set checkpoint.export=true"


class Generated(Shown):
    """A prompt and what a model wrote after it: `text` is both, `tokens` the ids of the latter."""

    def __init__(self, prompt: str, written: str, tokens: list[int]) -> None:
        self.prompt, self.written, self.tokens = prompt, written, tokens

    @property
    def text(self) -> str:
        """The prompt and what follows it."""
        return self.prompt + self.written

    def _parts(self) -> list[Part]:
        """The text in one line, and how many tokens were written."""
        return [Part(rows=[("prompt", self.prompt), ("written", self.written)])]

    def __str__(self) -> str:
        return self.text


def load_model(run: AnyRun, device: str = "auto") -> Transformer:
    """The model that a run trained, in fp32, ready to be called with token ids (B, S).

    The run must have exported it (`checkpoint.export`). `device`: cpu, cuda, or auto. UserError
    without an export, or for a damaged one.

    >>> model = lab.load_model("first")
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 1024])
    """
    folder = _exported(run)
    return load_hf(folder, device=_device(device)).eval()


def _device(asked: str) -> str:
    """The device asked for; `auto` is the GPU where there is one. UserError for one that is not
    there."""
    has_gpu = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if has_gpu else "cpu"
    name, _, number = str(asked).partition(":")
    if name not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise UserError(f"device is 'auto', 'cpu', 'cuda' or 'cuda:1', not {asked!r:.80}")
    if name == "cuda" and not (has_gpu and int(number or 0) < torch.cuda.device_count()):
        raise UserError(f"there is no device {asked!r} here; device='cpu' loads it on the CPU")
    return str(asked)


def load_run_tokenizer(run: AnyRun) -> Tokenizer:
    """The tokenizer beside the exported model of a run. UserError if there is none."""
    path = _exported(run) / TOKENIZER
    if not path.is_file():
        raise UserError(f"{path.parent} has no tokenizer: the run's tokens came without one")
    return load_tokenizer(path)


def generate(
    run: AnyRun,
    prompt: str,
    tokens: int = 40,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    model: Transformer | None = None,
) -> Generated:
    """What the model of a run writes after `prompt`: at most so many tokens, up to the end of its
    text.

    `temperature`: 0 takes the likeliest token, 1 draws as the model says. `model`: the run's, if
    you have it already. Raises UserError as `load_model`, and for a prompt of no tokens.

    >>> written = lab.generate("first", "import ", tokens=8)
    >>> written.text.startswith("import "), len(written.tokens) <= 8
    (True, True)
    """
    folder, tokenizer = _exported(run), load_run_tokenizer(run)
    if not isinstance(prompt, str):
        raise UserError(f'the prompt is a text, such as "import ", not {prompt!r}')
    if tokens < 1 or temperature < 0:
        raise UserError("generate wants tokens of at least 1 and a temperature of at least 0")
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise UserError("the prompt is empty; give it at least one letter")
    model = load_model(run) if model is None else model
    end, longest = _end_of_text(folder, tokenizer), max_positions(folder)
    written = _written(model, ids, tokens, end, longest, temperature, seed)
    return Generated(prompt, tokenizer.decode(written), written)


@torch.no_grad()
def _written(
    model: Transformer,
    ids: list[int],
    tokens: int,
    end: int | None,
    longest: int,
    temperature: float,
    seed: int,
) -> list[int]:
    device = model.output_weight.device
    random = torch.Generator().manual_seed(seed)
    written: list[int] = []
    for _ in range(tokens):
        context_1S = torch.tensor([[*ids, *written][-longest:]], device=device)
        logits_V = model(context_1S)[0, -1].float().cpu()
        if temperature == 0:
            new = int(logits_V.argmax())
        else:
            new = int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=random))
        if new == end:
            break
        written.append(new)
    return written


def _end_of_text(folder: Path, tokenizer: Tokenizer) -> int | None:
    name = eos_token(folder / TOKENIZER_CONFIG)
    return tokenizer.token_to_id(name) if name else None


def _exported(run: AnyRun) -> Path:
    folder = folder_of(run)
    if not (folder / "model" / "config.json").is_file():
        found = opened(folder)
        summary = found.summary
        if summary.kind not in ("train", "unknown"):
            raise UserError(f"{summary.id} is of kind {summary.kind}: it trained no model")
        if not found.config.get("checkpoint", {}).get("export"):
            raise UserError(f"{folder.name} exported no model; run it with {_EXPORT}")
        if summary.outcome == "unfinished":
            why = f"{summary.reason}; execute() ends with its export"
            raise UserError(f"{folder.name} has no model yet: {why}")
        raise UserError(f"{folder.name} exported no model: its outcome is {summary.outcome}")
    return folder / "model"
