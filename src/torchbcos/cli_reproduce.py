"""The command `reproduce`: the paper's experiments, run again and put beside its numbers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from torchbcos.cli_common import check_folder, errors, output

if TYPE_CHECKING:
    from torchbcos.reproduce import Trial


def reproduce(
    study: Annotated[
        str, typer.Argument(help="What to reproduce: cifar10, imagenette or imagenet.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change in all, as in epochs=2.", metavar="KEY=VALUE"),
    ] = None,
    data: Annotated[str, typer.Option(help="The folder of that data set.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for results, models, logs; else out/STUDY.")
    ] = None,
    only: Annotated[str, typer.Option(help="Run these experiments, comma-separated.")] = "",
    jobs: Annotated[int, typer.Option(help="Experiments side by side.", min=1)] = 1,
    methods: Annotated[
        str, typer.Option(help="What ours is compared with: 'all', or ixg,gradcam,…")
    ] = "all",
    grids: Annotated[
        int | None, typer.Option(help="Grids of the pointing game; else the study's.", min=1)
    ] = None,
    slow_grids: Annotated[
        int | None, typer.Option(help="Grids for slow methods: LIME, RISE, …", min=1)
    ] = None,
    commit: Annotated[
        str, typer.Option(help="The commit to record, if git cannot tell it here.")
    ] = "",
    page: Annotated[
        bool, typer.Option("--page", help="Run nothing: make the page from --results.")
    ] = False,
    results: Annotated[
        Path | None, typer.Option(help="With --page: its JSON files; else results/STUDY.")
    ] = None,
    docs: Annotated[
        Path, typer.Option(help="With --page: where STUDY.md and pictures/ go.")
    ] = Path("docs"),
    show_list: Annotated[bool, typer.Option("--list", help="Show the experiments.")] = False,
) -> None:
    """Train the paper's networks, measure them, and compare with what the paper reports.

    Each experiment leaves OUT/results/NAME.json as soon as it is measured. The same command again
    goes on where the last was stopped: what is finished is not run again.
    """
    from torchbcos.evidence import command
    from torchbcos.evidence import commit as source_commit
    from torchbcos.reproduce import MISTAKE, Trial, choose_study, pack, run_all

    about = choose_study(study)
    chosen = about.choose(n.strip() for n in only.split(",") if n.strip())
    if show_list:
        name, recipe = (2 + max(len(getattr(e, of)) for e in chosen) for of in ("name", "recipe"))
        for e in chosen:
            reported = f"  ({about.reported}: {e.paper} %)" if e.paper else ""
            _say(f"{e.name:<{name}}{e.recipe:<{recipe}}{e.what}{reported}")
        return
    if page:
        for path in about.write_page(results or Path("results") / study, docs):
            _say(f"Wrote {path}")
        return
    if not data:
        raise ValueError(f"`--data` is missing: name a folder with {about.data}.")
    out = out or Path("out") / study
    check_folder(out)
    evidence = {
        "command": command("torchbcos"),
        "commit": commit or source_commit(),
        "source": _source(),
        "side_by_side": jobs,
    }
    names = tuple(m.strip() for m in methods.split(",") if m.strip())
    trials = [
        Trial(
            e, e.config(data, changes or ()), out, data, names, grids or about.grids,
            slow_grids or about.slow_grids, evidence, smooth=about.smooth, slow=about.slow,
        )
        for e in chosen
    ]  # fmt: skip
    for trial in trials:  # results of other settings are refused before anything is read
        trial.finished()
    packed = pack([t.config for t in trials], out, errors)
    out.mkdir(parents=True, exist_ok=True)
    trials = [replace(t, config=config) for t, config in zip(trials, packed, strict=True)]
    for trial in trials:
        trial.check()
    ended = run_all(trials, jobs, errors)
    _print_results([t for t in trials if t.result.exists()], about.reported)
    stopped = [e.trial.name for e in ended if e.code == 130]
    if stopped:
        errors.print(f"stopped before the end of {', '.join(stopped)}: the same command goes on.")
        raise typer.Exit(130)
    failed = [e for e in ended if e.code]
    for one in failed:
        errors.print(one.report(), style="red", soft_wrap=True)
    if failed:
        raise typer.Exit(MISTAKE if all(e.code == MISTAKE for e in failed) else 1)


def _say(words: str) -> None:
    output.print(words, soft_wrap=True)


def _print_results(trials: list[Trial], reported: str) -> None:
    table = Table("experiment", "accuracy", reported, "localisation", "training")
    for trial in trials:
        found = json.loads(trial.result.read_bytes())
        ours = found["localisation"]["methods"].get("ours")
        table.add_row(
            trial.name,
            f"{found['accuracy']:.2%}",
            f"{trial.experiment.paper} %" if trial.experiment.paper else "",
            f"{ours['mean']:.3f}" if ours else "",
            f"{found['seconds']['training']:.0f} s",
        )
    if trials:
        output.print(table)


def _source() -> str:
    """A digest of the package's code and recipes, which also tells where there is no git."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".toml")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
