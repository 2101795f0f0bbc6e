"""Studies of rounds with confidences: how true those are, and what schedules make of them under load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.calibration import report as calibration_report
from dspark_jax.calibration.collect import Records
from dspark_jax.calibration.sts import STSFit, fit_temperatures, fit_with_biases
from dspark_jax.decoding.curve import Curve
from dspark_jax.decoding.sampling import Mode
from dspark_jax.evaluation.answering import System
from dspark_jax.evaluation.loads import Load
from dspark_jax.evaluation.outcomes import Outcome
from dspark_jax.evaluation.replay import Calibration, Replay, make_replay
from dspark_jax.evaluation.simulate_command import table
from dspark_jax.evaluation.simulate_plot import plot
from dspark_jax.evaluation.simulator import EngineSettings, simulate
from dspark_jax.evaluation.simulator import System as Served
from dspark_jax.evaluation.studies import DSPARK, MTP, Study, Variant
from dspark_jax.evaluation.study_analyses import Workbench, systems_of
from dspark_jax.evaluation.study_report import Headline, Report, per_cent
from dspark_jax.evaluation.tables import markdown_table
from dspark_jax.evaluation.tally import Result
from dspark_jax.profiling.measure import Models, prompt_lengths
from dspark_jax.profiling.provide import curve_for

_STAGES = {"before": "before", "temperatures": "STS", "after": "STS with biases"}
_SERVED: tuple[Served, ...] = ("plain", "fixed", "threshold", "causal", "async")
_REQUESTS = 100  # answers of a load that are measured


# --- rounds as records ---


def as_records(parts: Mapping[bool, Iterable[Outcome]], domains: Mapping[str, str], max_tokens: int) -> Records:
    """Rounds with confidences, as `dspark calibrate` records them.

    A round tells about as many positions as there are tokens of the answer left: how far the text goes does not depend
    on what was drafted, so leaving the others out does not bend any rate.

    Args:
        parts: held out or not, to its outcomes. domains: of the benchmarks. max_tokens: of an answer at most.

    Raises:
        ValueError: there are no rounds.
    """
    outcomes = [(held_out, one) for held_out, group in parts.items() for one in group]
    rows: dict[str, list[Any]] = {
        name: [] for name in ("confidence", "accepted", "verified", "request", "round", "position")
    }
    for request, (_, one) in enumerate(outcomes):
        length = 1
        for number, (accepted, verified) in enumerate(zip(one.accepted, one.verified, strict=True)):
            rows["confidence"].append(one.confidence[number])
            rows["accepted"].append(accepted)
            rows["verified"].append(min(verified, len(one.token_ids) - length))
            rows["request"].append(request)
            rows["round"].append(number)
            rows["position"].append(one.prompt_tokens + length - 1)
            length += accepted + 1
    if not rows["round"]:
        raise ValueError("answers without rounds: nothing to calibrate or to serve; give a larger --max-tokens")
    names = tuple(sorted({domains[one.benchmark] for _, one in outcomes}))
    kinds = {"confidence": np.float32, "accepted": np.int8, "verified": np.int8}
    return Records(
        **{name: np.asarray(values, kinds.get(name, np.int32)) for name, values in rows.items()},
        ids=tuple(f"{one.benchmark}/{one.conversation}/{one.turn}/{held_out:d}" for held_out, one in outcomes),
        domain=np.asarray([names.index(domains[one.benchmark]) for _, one in outcomes], np.int16),
        domains=names,
        held_out=np.asarray([held_out for held_out, _ in outcomes], bool),
        prompt_tokens=np.asarray([one.prompt_tokens for _, one in outcomes], np.int32),
        tokens=np.asarray([len(one.token_ids) for _, one in outcomes], np.int32),
        about={"max_tokens": max_tokens},
    )


def confident_rounds(bench: Workbench, variant: Variant) -> Records:
    """Rounds of whole blocks with confidences: those to fit on, and those of the benchmarks, held out."""
    system = bench.lab.system(variant, 0.0)
    domains = {one.name: one.domain for one in (*bench.benchmarks, *bench.fit_benchmarks)}
    parts = {
        held_out: bench.lab.answered(system, benchmarks, bench.top)
        for held_out, benchmarks in ((False, bench.fit_benchmarks), (True, bench.benchmarks))
    }
    return as_records(parts, domains, bench.top.max_tokens)


def fits_of(records: Records) -> dict[str, STSFit]:
    """Temperatures alone (STS), and with biases, fitted on what is not held out."""
    part = records.split(held_out=False)
    how = part.confidence, part.accepted, part.verified
    return {"temperatures": fit_temperatures(*how), "after": fit_with_biases(*how)}


# --- calibration ---


def calibration(study: Study, bench: Workbench, folder: Path) -> Report:
    """Calibration error and AUROC by position, before and after temperature scaling."""
    report = Report()
    records = confident_rounds(bench, bench.available(study, report)[0])
    fits = fits_of(records)
    held_out = records.split(held_out=True)
    split = calibration_report.split_report("held out", held_out, fits)
    rows = [["reading", "stage", "ECE %, mean", "ECE %, k = 1", "AUROC, lowest", "AUROC, highest"]]
    for reading in calibration_report.READINGS:
        for stage, title in _STAGES.items():
            found = split.metrics[stage][reading]
            aurocs = [m.auroc for m in found if np.isfinite(m.auroc)]
            ends = [f"{end(aurocs):.3f}" if aurocs else "-" for end in (min, max)]
            cells = (f"{100 * value:.2f}" for value in (split.mean_ece(stage, reading), found[0].ece))
            rows.append([reading, title, *cells, *ends])
    fit = fits["temperatures"]
    unfitted = [str(k) for k, there in enumerate(fit.fitted, start=1) if not there]
    report.sections += [
        f"Temperature {bench.top.temperature:g}; fitted on {len(records.split(held_out=False).accepted)} rounds, "
        f"judged on {split.rounds}. Temperatures {', '.join(f'{t:.3f}' for t in fit.temperatures)}."
        + (f" Too few rounds reach position {', '.join(unfitted)}: scaled as the one before." if unfitted else ""),
        markdown_table(rows, words=2),
        "By position (before > STS > STS with biases):",
        f"```\n{calibration_report.table(split, fits['after'])}\n```",
    ]
    report.headlines += _calibration_headlines(split)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "reliability.png"
    calibration_report.plot(
        picture, held_out, fits, "Before, STS (temperatures), and STS with biases (after), held out"
    )
    report.pictures = [picture]
    report.values |= {"fits": {name: asdict(one) for name, one in fits.items()}}
    report.values["held_out"] = calibration_report.as_json(split)
    return report


def _calibration_headlines(split: calibration_report.SplitReport) -> list[Headline]:
    stages = ("before", "temperatures")
    errors = [split.mean_ece(stage) for stage in stages]
    found = [
        Headline("calibration error before", "3 to 8 %", per_cent(errors[0], 2)),
        Headline("calibration error after STS", "about 1 %", per_cent(errors[1], 2)),
    ]
    aurocs = [m.auroc for m in split.metrics["before"]["cumulative"] if np.isfinite(m.auroc)]
    here = f"{min(aurocs):.2f} to {max(aurocs):.2f}" if aurocs else "-"
    return [*found, Headline("AUROC by position, cumulative", "0.81 to 0.90", here)]


# --- load ---


def load(study: Study, bench: Workbench, folder: Path) -> Report:
    """The simulator under loads, with this machine's curves and the rounds of the benchmarks."""
    report = Report(clocked=True)
    there = {one.name: one for one in bench.available(study, report)}
    if DSPARK not in there:
        raise ValueError(f"study {study.name}: serves {DSPARK}, which this target lacks: {report.left_out[DSPARK]}")
    systems_of(bench, there.values())  # trained before anything is measured
    block, single = there[DSPARK], there.get(MTP)
    records = confident_rounds(bench, block)
    fit = fits_of(records)["temperatures"]
    held_out = kept_requests(records)
    replay = make_replay([held_out], Calibration(fit.temperatures))
    results = [one for name in _SERVED for one in _served(bench, block, replay, name)]
    if single is not None:
        system = bench.lab.system(single)
        results += _served(bench, single, single_replay(bench, system), "mtp1")
    report.timings += [
        "Simulated with this machine's throughput curves and the recorded rounds, confidences calibrated by STS. "
        "`mtp1` is the MTP drafter with its own rounds and curve; per user: median tokens/s of an answer; budget: rows "
        "verified for a request and round, the anchor included.",
        f"```\n{table(results)}\n```",
    ]
    report.timing_values = {"results": [asdict(result) for result in results]}
    if single is not None:
        report.headlines, rows = matched(results)
        report.timings += ["Against MTP-1 (`-`: outside what was simulated):", markdown_table(rows)]
    report.headlines.append(_budget(results))
    report.values["temperatures"] = list(fit.temperatures)
    report.pictures = plot(folder, results)
    return report


def kept_requests(records: Records) -> Records:
    """The rounds and requests that are held out."""
    which = np.flatnonzero(records.held_out)
    number = np.full(len(records.ids), -1, np.int32)
    number[which] = np.arange(len(which))
    part = records.split(held_out=True)
    arrays = {name: getattr(records, name)[which] for name in ("domain", "held_out", "prompt_tokens", "tokens")}
    rounds = {name: getattr(part, name) for name in ("confidence", "accepted", "verified", "round", "position")}
    return Records(
        **arrays,
        **rounds,
        request=number[part.request],
        ids=tuple(records.ids[i] for i in which),
        domains=records.domains,
        about=records.about,
    )


def single_replay(bench: Workbench, system: System) -> Replay:
    """The rounds of a drafter without confidences: its acceptance rate stands for them."""
    outcomes = bench.lab.answered(system, bench.benchmarks, bench.top)
    accepted, verified = (sum(sum(getattr(one, name)) for one in outcomes) for name in ("accepted", "verified"))
    rate = min(max(accepted / max(verified, 1), 0.001), 0.999)
    assert system.drafter is not None
    row = (rate,) * system.drafter.config.block_size
    made = [replace(one, confidence=(row,) * one.rounds) for one in outcomes]
    domains = {one.name: one.domain for one in bench.benchmarks}
    return make_replay([as_records({True: made}, domains, bench.top.max_tokens)], Calibration())


def _served(bench: Workbench, variant: Variant, replay: Replay, name: Served) -> list[Result]:
    """A system under each load."""
    curve = _curve(bench, variant, int(replay.prompt.max()))
    engine = EngineSettings(slots=tuple(bench.slots))
    loads = [1 << i for i in range(bench.slots[-1].bit_length()) if 1 << i <= bench.slots[-1]]
    return [
        simulate(
            name, Load("closed", size, _REQUESTS, max(_REQUESTS // 4, size)), replay, curve, engine, seed=bench.seed
        )
        for size in loads
    ]


def _curve(bench: Workbench, variant: Variant, longest: int) -> Curve:
    """This machine's curve for a drafter, measured where it is not stored in the output folder."""
    trained = bench.lab.trained(variant.changes)
    mode: Mode = "greedy" if bench.top.temperature == 0 else "plain"
    models = Models(bench.lab.clocked.target, bench.lab.clocked.drafter(trained), mode, stop_ids=())
    folder = bench.lab.output / "curves"
    folder.mkdir(parents=True, exist_ok=True)
    return curve_for(
        models,
        bench.slots,
        (bench.context,),
        file=folder / f"{trained.name}-{mode}.json",
        measure=True,
        lengths=prompt_lengths(longest, models.positions),
        timing=bench.timing,
    )


def matched(results: Sequence[Result]) -> tuple[list[Headline], list[list[str]]]:
    """The schedules against MTP-1: at the same load, at the same speed per user, and at the same throughput."""
    frontiers = {name: [one for one in results if one.system == name] for name in ("mtp1", "causal", "async")}
    rows = [
        ["schedule", "load", "throughput", "per user", "throughput at its speed per user", "per user at its throughput"]
    ]
    best: dict[str, list[float]] = {"throughput": [], "per user": []}
    for name in ("causal", "async"):
        for ours, theirs in zip(frontiers[name], frontiers["mtp1"], strict=True):
            users = ours.tokens_per_second_per_user, theirs.tokens_per_second_per_user
            ratios = [ours.tokens_per_second / theirs.tokens_per_second, _ratio(*users)]
            across = [_at(frontiers[name], theirs, turned) for turned in (False, True)]
            for key, value in zip(best, across, strict=True):
                best[key] += [value] if value is not None else []
            cells = (per_cent(None if value is None else value - 1) for value in (*ratios, *across))
            rows.append([name, f"{ours.load:g}", *cells])
    found = [
        Headline("throughput at MTP-1's speed per user", "+51 %", _range(best["throughput"])),
        Headline("speed per user at MTP-1's throughput", "+60 to 85 %", _range(best["per user"])),
    ]
    return found, rows


def _budget(results: Sequence[Result]) -> Headline:
    """Rows that a request verifies in a round, at the ends of the loads."""
    budgets = [one.budget for one in results if one.system == "causal"]
    alone, loaded = budgets[0], budgets[-1]
    told = alone is not None and loaded is not None
    here = f"{alone:.1f} to {loaded:.1f} rows, alone to the largest load" if told else "-"
    return Headline("verify budget (causal)", "4 to 6, shrinking with load", here)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _range(values: Sequence[float]) -> str:
    ends = [f"{100 * (end(values) - 1):+.0f}" for end in (min, max)] if values else ["-"]
    return f"{' to '.join(dict.fromkeys(ends))} %" if values else "-"


def _at(frontier: Sequence[Result], other: Result, turned: bool) -> float | None:
    """How much more throughput a frontier has at another's speed per user, or (`turned`) speed at its throughput."""
    speeds = [one.tokens_per_second_per_user or 0.0 for one in (*frontier, other)]
    if not all(speeds):
        return None
    pairs = zip(speeds, (one.tokens_per_second for one in (*frontier, other)), strict=True)
    points = np.log([(b, a) if turned else (a, b) for a, b in pairs])
    known, (x, y) = points[:-1][np.argsort(points[:-1, 0])], points[-1]
    if not known[0, 0] <= x <= known[-1, 0]:
        return None
    return float(np.exp(np.interp(x, known[:, 0], known[:, 1]) - y))
