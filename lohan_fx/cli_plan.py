"""Commands that need no machine: ``lohan-fx models | plan | simulate | ablate``.

A command returns what it prints; `add_to` puts them into the command line.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lohan_fx.ablation import SLOW
from lohan_fx.errors import HardwareError, LohanError, PlanError
from lohan_fx.models import FAMILIES, family_of
from lohan_fx.plan import SCHEDULES
from lohan_fx.planned import Planned, hardware, step_table
from lohan_fx.planners import names
from lohan_fx.timeline import format_diff, load_trace, save_trace

Parts = Sequence[Table | str]

Model = Annotated[
    str,
    typer.Argument(
        help="A name that `lohan-fx models` lists, or module:function or file.py:function; the "
        "function returns a torch.nn.Module, or it and example inputs.",
        metavar="MODEL",
    ),
]
Hardware = Annotated[
    str,
    typer.Option("--hw", help="A preset (`lohan-fx presets`) or a profile's file.", metavar="HW"),
]
Sequence_ = Annotated[
    int | None, typer.Option("--sequence", min=1, help="Tokens of a sample, for language models.")
]
Optimizer = Annotated[
    str, typer.Option(help="adamw, adam, sgd, … of torch.optim, or none: activations alone.")
]
Dtype = Annotated[
    str, typer.Option(help="Compute dtype: bfloat16, float16, float32; auto; none: the model's.")
]
FullTrace = Annotated[
    bool, typer.Option("--full-trace", help="Trace every block, however many are equal.")
]
_MEMORY = "Budget, device=24GiB or device=24GiB,host=100GiB"
_STATES = "Tier of model states: auto, device, host or ssd."
_SWAP = "Tier of swapped activations: auto, host or ssd."
_SCHEDULES = ("auto", *SCHEDULES)
_SCHEDULE = f"How updates overlap: {', '.join(_SCHEDULES)}."


def add_to(
    app: typer.Typer,
    guard: Callable[[], AbstractContextManager[None]],
    show: Callable[..., None],
) -> None:
    """Register the commands; `guard` turns errors into messages, `show` prints parts."""
    for command in (models, plan, simulate, ablate):
        app.command()(_guarded(command, guard, show))


def _guarded(
    command: Callable[..., Parts],
    guard: Callable[[], AbstractContextManager[None]],
    show: Callable[..., None],
) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with guard():
            show(*command(*args, **kwargs))

    run.__annotations__["return"] = None
    return run


# -- commands --------------------------------------------------------------------------------


def models() -> Parts:
    """List the models that have a name."""
    found = []
    for family, what in FAMILIES.items():
        table = Table(title=f"{family}: {what}", title_justify="left", title_style="bold")
        table.add_column("name", no_wrap=True)
        for column in ("layers", "heads", "hidden"):
            table.add_column(column, justify="right")
        for m in family_of(family):
            table.add_row(m.name, str(m.layers), str(m.heads), str(m.hidden))
        found.append(table)
    return found


def plan(
    model: Model,
    hw: Hardware,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of one step; where a search starts.")
    ] = None,
    sequence: Sequence_ = None,
    strategy: Annotated[str | None, typer.Option(help="See `--help` of ablate.")] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help=_MEMORY + ".", metavar="TIER=SIZE")
    ] = None,
    states: Annotated[str, typer.Option(help=_STATES)] = "auto",
    swap_to: Annotated[str, typer.Option(help=_SWAP)] = "auto",
    schedule: Annotated[str, typer.Option(help=_SCHEDULE)] = "auto",
    accumulate: Annotated[
        bool,
        typer.Option(
            "--accumulate",
            help="Units have sums of gradients, as with accumulate= of compile; the step is the "
            "last micro-batch, with the updates.",
        ),
    ] = False,
    clip: Annotated[
        bool,
        typer.Option("--clip", help="Gradients are clipped by norm, as with clip_grad_norm=."),
    ] = False,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = "auto",
    search: Annotated[
        str | None,
        typer.Option(help="max-batch or max-model: the largest that fits.", metavar="WHAT"),
    ] = None,
    full_trace: FullTrace = False,
    out: Annotated[
        Path | None, typer.Option(help="Where to save the plan.", metavar="PLAN.json")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Where to save the simulated timeline.", metavar="TRACE.json"),
    ] = None,
) -> Parts:
    """Plan and simulate a training step, without weights or accelerator."""
    for path in (out, trace):
        _check_writable(path)
    from lohan_fx import planning

    source = _model(model, search)
    made = planning.plan(
        source,
        hw=hardware(hw),
        batch=batch,
        sequence=sequence,
        optimizer=_optimizer(optimizer),
        strategy=strategy or planning.DEFAULT_STRATEGY,
        memory=_budget(memory or []),
        dtype=_dtype(dtype),
        states=_one_of("states", states, "auto", "device", "host", "ssd"),
        swap_to=_one_of("swap-to", swap_to, "auto", "host", "ssd"),
        schedule=schedule,  # type: ignore[arg-type]  # checked there
        accumulates=accumulate,
        clips=clip,
        search=search,  # type: ignore[arg-type]  # checked there
        full_trace=full_trace,
    )
    parts = made.parts()
    if out is not None:
        made.save(out)
        typer.echo(f"saved {out}", err=True)
    if trace is not None:
        made.trace(trace)
        typer.echo(f"saved {trace}", err=True)
    return parts


def simulate(
    plans: Annotated[
        list[Path], typer.Argument(help="What `lohan-fx plan --out` wrote.", metavar="PLAN...")
    ],
    hw: Annotated[
        str | None,
        typer.Option(help="Another machine than planned for: a preset or a file.", metavar="HW"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Where to save the timelines, side by side.", metavar="TRACE.json"),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            help="Recorded steps, as `lohan_fx.timeline.save_trace` wrote them: compared with the "
            "first plan, and saved with it by --trace.",
            metavar="TRACE.json",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Where to draw the lanes over time (extra `plots`).", metavar="PNG"),
    ] = None,
) -> Parts:
    """Simulate plan files, side by side; on another machine with --hw."""
    _check_writable(trace)
    _check_writable(plot)
    _check_drawing(plot)
    real = load_trace(recorded) if recorded is not None else ()
    loaded = [_simulated(path, hw) for path in plans]
    parts: list[Table | str] = [step_table(loaded)]
    parts += [f"note: {text}" for p in loaded for text in p.misfits()]
    parts += [format_diff(loaded[0].simulation.timeline, step) for step in real]
    if trace is not None:
        save_trace(trace, [*(p.simulation.timeline for p in loaded), *real])
        typer.echo(f"saved {trace}", err=True)
    if plot is not None:
        from lohan_fx.plots import plot_timelines

        plot_timelines([*real, *(p.simulation.timeline for p in loaded)], plot)
        typer.echo(f"saved {plot}", err=True)
    return parts


def ablate(
    model: Model,
    hw: Hardware,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Samples of one step; repeat for several.")
    ] = None,
    sequence: Sequence_ = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeat for several; if absent, all but {' and '.join(sorted(SLOW))}, which take "
            f"minutes: {', '.join(names())}."
        ),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(help=_MEMORY + "; repeat for several.", metavar="TIER=SIZE"),
    ] = None,
    states: Annotated[list[str] | None, typer.Option(help=_STATES)] = None,
    swap_to: Annotated[list[str] | None, typer.Option(help=_SWAP)] = None,
    schedule: Annotated[list[str] | None, typer.Option(help=_SCHEDULE)] = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = "auto",
    full_trace: FullTrace = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run what fits, on this machine, too.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 3,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Save the table: .csv, .json or .md; repeatable.", metavar="FILE"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw time over swapped bytes (extra `plots`).", metavar="FILE.png"),
    ] = None,
    plot_memory: Annotated[
        Path | None,
        typer.Option(
            help="Draw throughput over activation memory (extra `plots`).", metavar="FILE.png"
        ),
    ] = None,
) -> Parts:
    """Compare strategies: predicted, and with --measure measured."""
    for path in (*(out or ()), plot, plot_memory):
        _check_writable(path)
    _check_drawing(plot, plot_memory)
    for path in out or ():
        if path.suffix not in (".csv", ".json", ".md"):
            raise LohanError(f"--out {path}: use a name that ends in .csv, .json or .md")
    from lohan_fx import ablation

    found = ablation.ablate(
        _model(model, None),
        hw=hardware(hw),
        strategies=strategy,
        batch=batch,
        memory=[_budget([m]) for m in memory] if memory else None,
        states=[_one_of("states", s, "auto", "device", "host", "ssd") for s in states or ["auto"]],
        swap_to=[_one_of("swap-to", s, "auto", "host", "ssd") for s in swap_to or ["auto"]],
        schedule=[_one_of("schedule", s, *_SCHEDULES) for s in schedule or ["auto"]],
        sequence=sequence,
        optimizer=_optimizer(optimizer),
        dtype=_dtype(dtype),
        full_trace=full_trace,
        measure=measure,
        steps=steps,
    )
    parts = found.tables()
    for path in out or ():
        found.save(path)
        typer.echo(f"saved {path}", err=True)
    for path, draw in ((plot, found.plot), (plot_memory, found.plot_memory)):
        if path is not None:
            draw(path)
            typer.echo(f"saved {path}", err=True)
    return parts


# -- arguments -------------------------------------------------------------------------------


def _simulated(path: Path, hw: str | None) -> Planned:
    """A plan file, simulated; what anything may have edited need not make sense."""
    found = Planned.load(path)
    if hw is not None:
        found = found.on(hardware(hw))
    try:
        step_table([found])
    except (HardwareError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PlanError(f"{path} cannot be simulated ({error!r}): save it again") from error
    return found


def _check_writable(path: Path | None) -> None:
    """Refuse before minutes of planning, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise LohanError(f"cannot save {path}: its directory does not exist")
    if path is not None and path.is_dir():
        raise LohanError(f"cannot save {path}: it is a directory, name a file")


def _check_drawing(*paths: Path | None) -> None:
    """The same of what draws, if there is something to draw."""
    if any(path is not None for path in paths):
        from lohan_fx.plots import check_drawing

        check_drawing()


def _one_of(what: str, value: str, *known: str) -> Any:
    if value not in known:
        raise LohanError(f"--{what} {value}: use one of {', '.join(known)}")
    return value


def _budget(requests: Iterable[str]) -> dict[str, int | str] | None:
    """``device=24GiB,host=100GiB`` → {"device": "24GiB", "host": "100GiB"}."""
    found: dict[str, int | str] = {}
    for part in (p for request in requests for p in request.split(",")):
        tier, equals, size = part.partition("=")
        if not equals or not size:
            raise HardwareError(f"--memory {part}: write it as device=24GiB")
        found[tier.strip()] = size.strip()
    return found or None


def _optimizer(name: str) -> str | None:
    return None if name.lower() == "none" else name


def _dtype(name: str) -> Any:
    if name in ("auto", "none"):
        return name if name == "auto" else None
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise LohanError(f"--dtype {name}: use auto, none, bfloat16, float16 or float32")
    return found


def _model(text: str, search: str | None) -> Any:
    """A model's name, or the function that ``module:function`` stands for."""
    if ":" not in text:
        if text.endswith(".py"):
            raise LohanError(f"{text} is a file: write {text}:function")
        if text.lower() in FAMILIES and search != "max-model":
            raise LohanError(
                f"{text} is a family: use it with --search max-model, or name one of "
                f"{', '.join(m.name for m in family_of(text))}"
            )
        if search != "max-model":
            from lohan_fx.models import named

            return named(text)
        return text
    where, _, name = text.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise LohanError(f"{where} does not exist")
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        if spec is None or spec.loader is None:
            raise LohanError(f"{where} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            module = importlib.import_module(where)
        except ImportError as error:
            raise LohanError(f"cannot import {where}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise LohanError(f"{where} has no function {name!r}")
    return found
