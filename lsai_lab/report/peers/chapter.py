"""The chapter "Other trainers at the same work": our trainer, the Hugging Face Trainer and torchtitan, machine by machine."""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lsai_lab.kit.style import apply_style, series_style
from lsai_lab.report.pandoc import code_block
from lsai_lab.report.peers.settings import FRAMEWORKS, NAMES, OURS, Setting, load_results
from lsai_lab.report.show import show_figure, show_table, show_text
from lsai_lab.report.variants import brief, sittings
from lsai_lab.runs.session import Session


def load(own_runs: list[str], profile: str | None) -> list[Setting]:
    """Every setting of every machine that has records; an empty list (and a sentence) if there are none."""
    apply_style()
    found = load_results(own_runs, profile)
    if not found:
        show_text("Nothing has been measured for this chapter yet: `lsai study peers` does it.")
    return found


def show_results(all_settings: list[Setting]) -> None:
    """Per machine: what follows, then a table for each setting and a figure of the largest."""
    for machine in dict.fromkeys(setting.machine for setting in all_settings):
        mine = [setting for setting in all_settings if setting.machine == machine]
        show_text(f"## Results on {machine} {{#sec-peers-{mine[0].label.rsplit('-', 1)[0]}}}")
        apart = sittings([run for setting in mine for run in setting.runs.values()])
        for sentence in [*(sentence for setting in mine for sentence in conclusions(setting)), *filter(None, [apart])]:
            show_text(f"- {sentence}")
        for setting in mine:
            _table(setting)
        most = max(mine, key=lambda setting: len(setting.ok))
        if len(most.ok) > 1:
            show_figure(
                speed_figure(most),
                f"fig-peers-{most.label}",
                f"Training speed on {machine}: {most.title}. Filled: bf16, open: fp8. The line spans the quartiles of the steps; the "
                "number is the MFU.",
            )


def conclusions(setting: Setting) -> list[str]:
    """Sentences that this setting's numbers support: ours against each peer's fastest at equal precision, compiled or not."""
    rows, sentences = setting.ok, []
    ours = rows[(rows["framework"] == OURS) & ~rows["plain"]]
    for name in NAMES.values():
        peers = rows[rows["framework"] == name]
        for precision in dict.fromkeys(peers["precision"]):
            mine, theirs = ours[ours["precision"] == precision], peers[peers["precision"] == precision]
            # Our fp8 recipes differ in what they scale by, so each is compared.
            chosen = (
                [row for _, row in mine.iterrows()] if precision == "fp8" else [_fastest(mine)] if len(mine) else []
            )
            for one in chosen:
                sentences.append(_against(setting, one, _fastest(theirs), f"*{name}, {precision}:*"))
        eager = peers[~peers["compiled"] & (peers["precision"] != "fp8")]
        mine = ours[~ours["compiled"] & (ours["precision"] != "fp8")]
        # Where nothing is compiled, this is the sentence above.
        if len(eager) and len(mine) and ours["compiled"].any():
            sentences.append(_against(setting, _fastest(mine), _fastest(eager), f"*{name}, eager:*"))
    plain = rows[rows["plain"]]
    reference = rows[rows["variant"] == setting.reference]
    if len(plain) and len(reference):
        sentences.append(_against(setting, reference.iloc[0], plain.iloc[0], f"*{_upper(setting.title)}:*"))
    counts = rows["parameters"].dropna().unique()
    if len(counts) > 1:
        sentences.append(
            f"**Not the same model:** the parameters of these trainings differ ({sorted(map(int, counts))})."
        )
    bad = setting.rows[setting.rows["outcome"] != "ok"]
    return sentences + [
        f"{setting.link(row)} ended as **{row['outcome']}**: {brief(row['reason'])}." for _, row in bad.iterrows()
    ]


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _fastest(rows: pd.DataFrame) -> pd.Series:
    return rows.loc[rows["tokens_per_s"].idxmax()]


def _against(setting: Setting, mine: pd.Series, theirs: pd.Series, lead: str) -> str:
    ratio = mine["tokens_per_s"] / theirs["tokens_per_s"]
    text = (
        f"{lead} {setting.link(mine)} trains {mine['tokens_per_s']:,.0f} tokens/s, {setting.link(theirs)} "
        f"{theirs['tokens_per_s']:,.0f}: {ratio:.2f} times as many"
    )
    if (
        mine["tokens_per_s_p25"] <= theirs["tokens_per_s_p75"]
        and theirs["tokens_per_s_p25"] <= mine["tokens_per_s_p75"]
    ):
        text += ", no difference beyond the spread of the steps"
    memory = (mine["mem_peak_allocated_gib"], theirs["mem_peak_allocated_gib"])
    if not np.isnan(memory).any():
        text += f", in {memory[0]:.3g} instead of {memory[1]:.3g} GiB"
    return text + "."


def _table(setting: Setting) -> None:
    rows = setting.rows
    spread = [
        f"{row['tokens_per_s_p25']:,.0f} to {row['tokens_per_s_p75']:,.0f}" if row["tokens_per_s"] > 0 else None
        for _, row in rows.iterrows()
    ]
    table = pd.DataFrame(
        {
            "trainer": rows["label"],
            "key": rows["key"],
            "how": rows["precision"] + np.where(rows["compiled"], ", compiled", ", eager"),
            "attention": rows["attention"],
            "tokens/s": rows["tokens_per_s"],
            "quartiles": spread,
            "of ours": rows["of_ours"],
            "MFU (%)": rows["mfu"] * 100,
            "peak (GiB)": rows["mem_peak_allocated_gib"],
            "first step (s)": rows["first_step_s"],
            "outcome": rows["outcome"],
        }
    )
    if (rows["outcome"] == "ok").all():
        table = table.drop(columns="outcome")
    source = next(
        (run.summary.results["mfu_peak_source"] for run in setting.runs.values() if run.summary.results.get("mfu")), ""
    )
    parameters = rows["parameters"].max()
    counted = (
        f", {parameters / 1e9:.2f} billion parameters"
        if parameters >= 1e9
        else f", {parameters / 1e6:.2f} M parameters"
    )
    ours = rows[rows["variant"] == setting.reference]["label"]
    show_table(
        table,
        f"tbl-peers-{setting.label}",
        f"{_upper(setting.title)}{counted if parameters > 0 else ''}, on {setting.machine}. Tokens/s: the median step after warm-up, of "
        f"{int(rows['steps_timed'].min()) if rows['steps_timed'].notna().any() else 0} steps or more."
        + (f" *Of ours*: against the row {ours.iloc[0]!r}." if len(ours) else "")
        + (f" MFU against {source}." if source else ""),
        formats={
            "tokens/s": "{:,.0f}", "of ours": "{:.2f}x", "MFU (%)": ".1f", "peak (GiB)": ".1f" if parameters > 1e9 else ".3f",
            "first step (s)": ".1f",
        },
        links={"trainer": "key"},
    )  # fmt: skip


def speed_figure(setting: Setting) -> Figure:
    """A dot per variant: shape and colour tell the framework, filled or open the precision."""
    rows = setting.ok
    fig, axes = plt.subplots(figsize=(6.3, 0.9 + 0.26 * len(rows)))
    speed = rows["tokens_per_s"] / 1e3
    for number, (_, row) in enumerate(rows.iterrows()):
        style = series_style(FRAMEWORKS.index(row["framework"]))
        low, value, high = (row[f"tokens_per_s{end}"] / 1e3 for end in ("_p25", "", "_p75"))
        axes.plot([low, high], [number, number], color="black", linewidth=1)
        axes.plot(
            [value], [number], marker=style["marker"], markersize=8, color=style["color"], linestyle="none",
            markerfacecolor="white" if row["precision"] == "fp8" else style["color"],
        )  # fmt: skip
        if row["mfu"] > 0:
            axes.annotate(
                f"{row['mfu']:.1%}", (max(high, value), number), xytext=(8, 0), textcoords="offset points", va="center",
                fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    for name in FRAMEWORKS:
        if (rows["framework"] == name).any():
            style = series_style(FRAMEWORKS.index(name))
            axes.plot([], [], marker=style["marker"], color=style["color"], linestyle="none", markersize=8, label=name)
    axes.set_yticks(range(len(rows)), rows["label"])
    axes.set(xlabel="thousand tokens per second", ylim=(len(rows) - 0.5, -0.5), xlim=(0, speed.max() * 1.18))
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def show_trainers(all_settings: list[Setting]) -> None:
    """What each variant is, and the versions that ran."""
    if not all_settings:
        return
    study = Session().study("peers")
    frameworks = {row["variant"]: row["framework"] for setting in all_settings for _, row in setting.rows.iterrows()}
    rows = [
        {"of": frameworks[name], "trainer": variant.label, "what it is": variant.note}
        for name, variant in study.variants.items()
        if name in frameworks and variant.note
    ]
    show_table(
        pd.DataFrame(rows),
        "tbl-peers-trainers",
        "The trainings that are compared, as the study has them; each table says how they ran on that machine.",
    )
    ran: dict[str, dict[str, None]] = {}
    for setting in all_settings:
        for run in setting.runs.values():
            versions = str(run.summary.results.get("versions") or "")
            ran.setdefault(setting.machine, {}).update(dict.fromkeys(filter(None, versions.split(", "))))
    found = [f"{machine}: {', '.join(versions)}" for machine, versions in ran.items() if versions]
    if found:
        show_text("Versions that ran. " + "; ".join(found) + ".")


def show_commands(all_settings: list[Setting]) -> None:
    """The exact command of every training of a peer that ended well, folded away; `$RUN` stands for the run's folder."""
    parts = []
    for setting in all_settings:
        for variant, run in setting.runs.items():
            results = run.summary.results
            if run.summary.kind != "peer" or not results.get("command"):
                continue
            text = textwrap.fill(
                results["command"], 96, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            text = text.replace("\n", " \\\n")
            if results["framework"] == "hf":
                text += "\n# with\n" + textwrap.fill(
                    results["arguments"], 96, subsequent_indent="  ", break_on_hyphens=False
                )
                text += (
                    f"\n# and AutoModelForCausalLM.from_config(..., attn_implementation={run.config['attention']!r})"
                )
            parts.append(f"**{variant}** ({setting.machine}, {setting.title})\n\n{code_block(text, '.bash')}")
    if not parts:
        show_text("No training of another trainer has ended well so far, so there is no command to show.")
        return
    body = "\n\n".join(parts)
    show_text(
        f"<details>\n<summary>The exact commands of {len(parts)} trainings by other trainers</summary>\n\n{body}\n\n</details>"
    )
