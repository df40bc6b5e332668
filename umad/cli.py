"""The `umad` command: thin commands over the package. Heavy libraries are imported by the command that needs them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from umad import __version__
from umad.records import RunError, UserError

app = typer.Typer(
    name="umad",
    help="Train, run and measure language models that debate.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads it)
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's, e.g. training.steps=10"),
]


def _version(value: bool) -> None:
    if value:
        print(f"umad {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def quickstart(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the warm start and of training.")] = 0,
) -> None:
    """The whole loop on the CPU, nothing downloaded: warm-start two tiny agents, train them, evaluate, report.

    Example: umad quickstart --out runs/first --seed 1
    """
    from umad.runs.quickstart import quickstart as run

    run(out, seed, overrides or [])


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the resolved recipe, then stop.")] = False,
) -> None:
    """Train the agents of a recipe.

    Example: umad train recipes/tiny_umad.yaml seed=1 output=runs/tiny_1
    """
    from umad.recipe_io import dump_recipe, load_recipe
    from umad.runs.build import check

    loaded = load_recipe(recipe, overrides or [])
    if dry_run:
        check(loaded)
        print(dump_recipe(loaded), end="")
        return
    from umad.runs.tables import print_run
    from umad.runs.training import train as run

    print_run(run(loaded, resume=resume).path)


@app.command()
def sft(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe with a section `sft`.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the next agent.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the resolved recipe, then stop.")] = False,
) -> None:
    """Fine-tune the agents of a recipe on worked solutions, or on right responses of recorded debates.

    Example: umad sft recipes/smollm2_sft.yaml output=runs/warm
    """
    from umad.recipe_io import dump_recipe, load_recipe
    from umad.runs.sft import check
    from umad.runs.sft import sft as run

    loaded = load_recipe(recipe, overrides or [])
    if dry_run:
        check(loaded)
        print(dump_recipe(loaded), end="")
        return
    from umad.runs.tables import print_run

    print_run(run(loaded, resume=resume).path)


@app.command("plan")
def plan_(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Overrides = None,
    gpu: Annotated[Optional[str], typer.Option(help="A100-80, H100, H200, 4090, ...: memory and speed.")] = None,  # noqa: UP045
    gpu_memory: Annotated[Optional[float], typer.Option(help="GB of one GPU, in place of its own.")] = None,  # noqa: UP045
    gpus: Annotated[Optional[int], typer.Option(help="GPUs that train together.")] = None,  # noqa: UP045
    zero: Annotated[Optional[int], typer.Option(help="DeepSpeed's ZeRO stage; 0: no DeepSpeed.")] = None,  # noqa: UP045
    offload: Annotated[Optional[str], typer.Option(help="To CPU memory: none, optimizer or all.")] = None,  # noqa: UP045
    accelerate: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Take GPUs, stage and offloading from an Accelerate configuration."),
    ] = None,
    accuracy: Annotated[Optional[float], typer.Option(help="Expected accuracy, for groups without signal.")] = None,  # noqa: UP045
    mean_length: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Expected tokens of a response; half of sampling.max_tokens by default."),
    ] = None,
    problem_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Expected tokens of a problem with instruction and template."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """What a run will need: memory per GPU and phase, tokens, FLOPs and time per step. No GPU and no weights needed.

    Example: umad plan recipes/umad_math_hetero.yaml --gpu H100 --accelerate recipes/accelerate/zero3.yaml
    """
    from umad.runs.plan import Options, plan_command

    options = Options(gpu, gpu_memory, gpus, zero, offload, accelerate, accuracy, mean_length, problem_tokens)
    plan_command(recipe, overrides or [], options, as_json=as_json)


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe, or a run folder.")],
    overrides: Overrides = None,
    step: Annotated[Optional[str], typer.Option(help="Of a run: a step, or 'all'; the newest by default.")] = None,  # noqa: UP045
) -> None:
    """Evaluate agents over turns 1..T: accuracy with intervals, uncertainty, cost.

    Example: umad eval runs/tiny_umad --step all evaluation.turns=5
    """
    from umad.runs.evaluating import eval_command
    from umad.runs.tables import print_evaluation

    for folder in eval_command(target, overrides or [], step):
        print_evaluation(folder)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    agent: Annotated[str, typer.Option(help="Which of its agents.")],
    to: Annotated[str, typer.Option(metavar="DIR|hub:NAME", help="A folder, or a repository on the Hub.")],
    step: Annotated[Optional[str], typer.Option(help="A step, or 'best'; the newest by default.")] = None,  # noqa: UP045
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write an agent's model folder with a model card.

    Example: umad export runs/tiny_umad --agent qwen2 --to models/qwen2_debater --step best
    """
    from umad.runs.export import export as write

    write(run, agent, to, step, force=force)


@app.command()
def grade(
    file: Annotated[Path, typer.Argument(help="JSON lines with `gold` and `candidate`.")],
    out: Annotated[Optional[Path], typer.Option(help="Where the graded rows go; FILE.graded.jsonl by default.")] = None,  # noqa: UP045
    kind: Annotated[
        str, typer.Option(help="math, number, choice, text or code:module:function; a row's `kind` wins.")
    ] = "math",
    require_box: Annotated[bool, typer.Option("--require-box", help="Only a boxed answer counts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Grade rows: adds `equal` (true, false, null), `extracted` and `status`.

    Example: umad grade answers.jsonl --out graded.jsonl --kind number
    """
    from umad.runs.grading import grade_command

    grade_command(file, out, kind, require_box=require_box, as_json=as_json)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write a run's report: one HTML file that needs no network."""
    from umad.reporting.report import write_report

    print(write_report(run))


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Where a run is."""
    from umad.reporting.status import status as look
    from umad.runs.tables import print_status

    found = look(run)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print_status(found)


@app.command()
def analyze(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with debates.jsonl, or such a file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Uncertainty, flips and agreement of recorded debates; writes uncertainty.json beside them."""
    from umad.runs.tables import analyze_command

    analyze_command(folder, as_json=as_json)


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR DIR...", help="Evaluations or runs; all against the first.")
    ],
    out: Annotated[Optional[Path], typer.Option(help="Where comparison.json goes.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Paired statistics between two evaluations: differences with intervals, McNemar, Holm.

    Example: umad compare runs/a/eval/step_000000 runs/a/eval/step_000120
    """
    from umad.runs.tables import compare_command

    compare_command(folders, out, as_json=as_json)


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed while running, 2 the user's input is wrong, 130 interrupted."""
    try:
        app(args=argv)
    except UserError as error:
        _fail(str(error), 2)
    except RunError as error:
        _fail(str(error), 1)
    except SystemExit as end:
        if end.code == 130:
            _fail("interrupted; a training run goes on with --resume", 130)
        raise


def _fail(message: str, code: int) -> None:
    from umad.reporting.progress import printable

    rank = os.environ.get("RANK")
    who = "umad" if rank is None or os.environ.get("WORLD_SIZE") == "1" else f"umad (process {rank})"
    print(f"{who}: {printable(message)}", file=sys.stderr)
    if who != "umad":
        # not in the ordinary way: that could wait for processes that wait for this one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
