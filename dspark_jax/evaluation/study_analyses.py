"""What is measured for each kind of study, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.batching import capacity_for
from dspark_jax.evaluation import tables
from dspark_jax.evaluation.answering import PLAIN, Protocol, System
from dspark_jax.evaluation.benchmarks import ALL, Benchmark
from dspark_jax.evaluation.outcomes import Outcome
from dspark_jax.evaluation.plots import panels, plot
from dspark_jax.evaluation.scores import Estimate, Scores, score
from dspark_jax.evaluation.studies import DFLASH, DSPARK, EAGLE3, MTP, NGRAM, Study, Variant
from dspark_jax.evaluation.study_plots import draw
from dspark_jax.evaluation.study_report import Headline, Report, difference, differences, gain, per_cent
from dspark_jax.evaluation.study_run import Lab, Trained
from dspark_jax.evaluation.study_timing import Samples, draft_rounds, head_rounds, kept, median, ratio, untrained
from dspark_jax.profiling.curves import key_of
from dspark_jax.profiling.measure import Timing

THRESHOLDS = tuple(round(0.1 * i, 1) for i in range(10))
CONTEXT = 512  # tokens of the caches that rounds are timed with, at most
_LENGTH = "accepted length"
_ACCEPTED = (
    "Committed tokens per round, bonus token included; columns of domains, and of all, are means of their benchmarks. "
    "In brackets 95 % intervals by resampling conversations."
)


@dataclass(frozen=True)
class Workbench:
    """What studies measure with.

    Attributes:
        lab: trains and answers. benchmarks: what is asked. fit_benchmarks: what confidences are calibrated on.
        protocols: how, one for each temperature. seed: of the intervals.
        slots: requests at a time that rounds are timed with, ascending. timing: how long and how often.
    """

    lab: Lab
    benchmarks: Sequence[Benchmark]
    fit_benchmarks: Sequence[Benchmark]
    protocols: Sequence[Protocol]
    seed: int
    slots: Sequence[int]
    timing: Timing

    @property
    def top(self) -> Protocol:
        """The protocol of the highest temperature: what studies of one temperature use, 1 in the paper."""
        return max(self.protocols, key=lambda protocol: protocol.temperature)

    @property
    def context(self) -> int:
        """Tokens of the caches that rounds are timed with."""
        return min(CONTEXT, capacity_for(self.lab.target_config.max_positions))

    def available(self, study: Study, report: Report) -> list[Variant]:
        """The variants that this target has; the others are noted in the report.

        Raises:
            ValueError: it has none of them.
        """
        reasons = {one.name: self.lab.lacks(one) for one in study.variants}
        report.left_out |= {name: reason for name, reason in reasons.items() if reason}
        found = [one for one in study.variants if not reasons[one.name]]
        if not found:
            raise ValueError(f"study {study.name}: {next(iter(report.left_out.values()))}")
        return found

    def scores(self, systems: Mapping[str, System], protocol: Protocol, baseline: str | None = None) -> Scores:
        """Figures of systems, under the names that they have here."""
        found: list[Outcome] = []
        for name, system in systems.items():
            answers = self.lab.answered(system, self.benchmarks, protocol)
            found += [replace(outcome, system=name) for outcome in answers]
        return score(found, self.benchmarks, tuple(systems), baseline=baseline, seed=self.seed, clock=protocol.clock)

    def timed(self, name: str, key: Mapping[str, Any], measure: Callable[[], Samples]) -> Samples:
        """Samples of a timing, measured once for these settings on this machine."""
        machine = asdict(key_of(self.lab.target_config, None, jnp.dtype(self.lab.clocked.dtype), "plain", None))
        known = {**key, "machine": machine, "timing": asdict(self.timing), "context": self.context}
        return kept(self.lab.output / "timings" / f"{name}.json", known, measure)


# --- accepted lengths of several drafters ---


def systems_of(bench: Workbench, variants: Iterable[Variant]) -> dict[str, System]:
    """The systems of variants; all are trained before the first is loaded.

    Those that read most layers come first: the hidden states that they leave serve the others too.
    """
    variants = list(variants)
    for variant in sorted(variants, key=lambda one: "drafter.target_layer_ids" in one.changes):
        if variant.trained:
            bench.lab.trained(variant.changes)
    return {variant.name: bench.lab.system(variant) for variant in variants}


def accepted_sections(bench: Workbench, study: Study, systems: Mapping[str, System], report: Report) -> list[Scores]:
    """Tables of accepted lengths at each temperature; their scores."""
    found = []
    for protocol in bench.protocols:
        scores = bench.scores(systems, protocol, PLAIN if PLAIN in systems else None)
        where = f"T{protocol.temperature:g}"
        report.values.setdefault("scores", {})[where] = without_speed(scores)
        report.sections += [f"### Temperature {protocol.temperature:g}", _ACCEPTED, tables.accepted_lengths(scores)]
        report.sections += [tables.intervals(scores), *filter(None, [tables.dropped(scores)])]
        pairs = differences(scores, study.pairs)
        if pairs:
            report.sections += ["Differences over the same conversations, resampled together:", pairs]
        if protocol.method == "decode":
            report.timings += [f"### Speed at temperature {protocol.temperature:g}", tables.speed(scores)]
            report.timings += filter(None, [tables.untimed(scores)])
            report.timing_values[where] = scores.as_json()["by_domain"]
        found.append(scores)
    return found


def without_speed(scores: Scores) -> dict[str, Any]:
    """Scores as JSON values, but for those that follow from the clock."""
    values = scores.as_json()
    for table in ("by_benchmark", "by_domain"):
        for row in values[table].values():
            for figures in row.values():
                for name in ("seconds", "tokens_per_second", "speedup"):
                    del figures[name]
    return values


def describe(bench: Workbench, variants: Sequence[Variant], systems: Mapping[str, System], report: Report) -> None:
    """A table of the trained drafters: which they are, their parameters, and what training said of them."""
    rows = [["drafter", "kept as", "parameters", "updates", "expected tokens a round, held out"]]
    for variant in variants:
        if not variant.trained:
            continue
        trained = bench.lab.trained(variant.changes)
        size = sum(leaf.size for name, leaf in _leaves(systems[variant.name]) if name != "d2t")
        tau = trained.facts["held_out"].get("held_out_tau_probabilistic")
        rows.append(
            [variant.name, trained.name, f"{size / 1e6:.2f} M", str(trained.facts["updates"]), tables.number(tau)]
        )
        facts = {name: value for name, value in trained.facts.items() if name not in ("settings", "seconds_per_update")}
        report.values.setdefault("drafters", {})[variant.name] = {"name": trained.name, "parameters": size, **facts}
    report.sections += ["### Drafters", tables.markdown_table(rows, words=2)]


def _leaves(system: System) -> list[tuple[str, Any]]:
    assert system.drafter is not None
    named = jax.tree_util.tree_leaves_with_path(system.drafter.params)
    return [(path[0].key, leaf) for path, leaf in named]


def drafters(study: Study, bench: Workbench, folder: Path) -> Report:
    """Accepted lengths of trained drafters, along the axis of the study where it has one."""
    report = Report()
    variants = bench.available(study, report)
    systems = systems_of(bench, variants)
    for protocol, scores in zip(bench.protocols, accepted_sections(bench, study, systems, report), strict=True):
        where = f"T{protocol.temperature:g}"
        if study.axis:
            report.pictures.append(_along_axis(study, variants, scores, folder, protocol))
        else:
            report.pictures += _plotted(folder / where, scores)
        if protocol is bench.top:
            report.headlines += _headlines(study, scores)
    describe(bench, variants, systems, report)
    for measure in study.measures:
        _MEASURES[measure](study, bench, variants, systems, report)
    return report


def _plotted(folder: Path, scores: Scores) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return plot(folder, scores)


def _along_axis(study: Study, variants: Sequence[Variant], scores: Scores, folder: Path, protocol: Protocol) -> Path:
    """The picture of accepted lengths along the axis; on an axis of sizes 0 stands for all, twice the largest."""
    sizes = sorted({variant.x for variant in variants if variant.x})
    last = 2 * sizes[-1] if sizes else 1
    spread = bool(sizes) and sizes[-1] / sizes[0] > 6
    places = [(x, f"{x:g}") for x in sizes] + ([(last, "full")] if any(v.x == 0 for v in variants) else [])
    curves: dict[str, dict[str, list[tuple[float, Estimate]]]] = {}
    for column in panels(scores):
        lines = curves.setdefault(column.title, {})
        for variant in variants:
            found = scores.by_domain[variant.name][column.name].accepted_length
            lines.setdefault(variant.series, []).append((variant.x or last, found))
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{study.title}: accepted length at temperature {protocol.temperature:g} (95 % intervals)"
    file = folder / f"accepted-T{protocol.temperature:g}.png"
    return draw(file, curves, title, study.axis, "committed tokens per round", places=places, logarithmic=spread)


def _headlines(study: Study, scores: Scores) -> list[Headline]:
    """The paper's figures of the studies of depth, beside ours."""
    found = []
    if study.name == "depth":
        one, other = study.pairs[0]
        if {one, other} <= set(scores.systems):
            here = tables.with_interval(difference(scores, one, other)[ALL], sign=True)
            found.append(Headline(f"{_LENGTH}, {one} - {other}", "above 0", here))
    return found


_PAPER_GAINS = {EAGLE3: "26.7 to 30.9 %", DFLASH: "16.3 to 18.4 %"}


def main(study: Study, bench: Workbench, folder: Path) -> Report:
    """Drafters compared, with the gains of DSpark over each."""
    report = Report()
    variants = bench.available(study, report)
    systems = systems_of(bench, variants)
    for protocol, scores in zip(bench.protocols, accepted_sections(bench, study, systems, report), strict=True):
        report.pictures += _plotted(folder / f"T{protocol.temperature:g}", scores)
        rows = [["gain of DSpark over", *(column.title for column in scores.domains)]]
        others = [other for other in (DFLASH, EAGLE3, MTP, NGRAM) if {DSPARK, other} <= set(scores.systems)]
        for other in others:
            gains = {column.name: gain(scores, DSPARK, other, column.name) for column in scores.domains}
            rows.append([other, *map(per_cent, gains.values())])
            report.values.setdefault("gains", {}).setdefault(f"T{protocol.temperature:g}", {})[other] = gains
        if others:
            report.sections += ["Gains, ratios of the means less 1:", tables.markdown_table(rows)]
        if protocol is bench.top:
            for other in (other for other in _PAPER_GAINS if other in others):
                here = per_cent(gain(scores, DSPARK, other, ALL))
                figure = f"gain of DSpark over {other}, all benchmarks"
                report.headlines.append(Headline(figure, _PAPER_GAINS[other], here))
    describe(bench, variants, systems, report)
    return report


def positions(study: Study, bench: Workbench, folder: Path) -> Report:
    """Acceptance by position, conditional on the prefix."""
    report = Report()
    systems = systems_of(bench, bench.available(study, report))
    for protocol in bench.protocols:
        scores = bench.scores(systems, protocol)
        where = f"T{protocol.temperature:g}"
        report.values.setdefault("scores", {})[where] = without_speed(scores)
        report.sections += [
            f"### Temperature {protocol.temperature:g}",
            "Per cent of the draft tokens at position k that were accepted, where all before them were; the rounds of "
            "a domain's benchmarks together.",
            tables.positions(scores),
        ]
        report.pictures += [path for path in _plotted(folder / where, scores) if path.stem == "position"]
    return report


# --- confidences ---

_PAPER_THRESHOLDS = {"chat": "45.7 to 95.7 %", "math": "76.9 to 92.5 %", "code": "67.6 to 92.0 %"}


def threshold(study: Study, bench: Workbench, folder: Path) -> Report:
    """Acceptance rate, verified drafts and accepted length by the threshold of the confidence."""
    report = Report()
    variant = bench.available(study, report)[0]
    systems = {f"{value:g}": bench.lab.system(variant, value) for value in THRESHOLDS}
    scores = bench.scores(systems, bench.top)
    report.values["scores"] = without_speed(scores)
    rows = [["domain", "threshold", "acceptance rate %", "verified per round", _LENGTH]]
    rates: dict[str, list[tuple[float, Estimate]]] = {}
    trade: dict[str, list[tuple[float, Estimate]]] = {}
    for column in scores.domains:
        for name in systems:
            found = scores.by_domain[name][column.name]
            cells = (tables.with_interval(found.acceptance_rate, 1, 100), tables.with_interval(found.verified))
            rows.append([column.title, name, *cells, tables.with_interval(found.accepted_length)])
            rates.setdefault(column.title, []).append((float(name), found.acceptance_rate))
            trade.setdefault(column.title, []).append((found.verified.value or 0.0, found.accepted_length))
        if column.name in _PAPER_THRESHOLDS:
            ends = [
                scores.by_domain[f"{at:g}"][column.name].acceptance_rate.value for at in (THRESHOLDS[0], THRESHOLDS[-1])
            ]
            here = f"{per_cent(ends[0])} to {per_cent(ends[1])}"
            figure = f"acceptance, {column.title}, from whole blocks to the highest threshold"
            report.headlines.append(Headline(figure, _PAPER_THRESHOLDS[column.name], here))
    how = f"Temperature {bench.top.temperature:g}; the confidences are the head's own, not calibrated."
    report.sections += [how, tables.markdown_table(rows, words=2)]
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{study.title} at temperature {bench.top.temperature:g}"
    report.pictures = [
        draw(folder / "acceptance.png", {title: rates}, "", "threshold", "accepted of the verified drafts", share=True),
        draw(folder / "verified.png", {title: trade}, "", "verified drafts per round", "committed tokens per round"),
    ]
    return report


# --- timings ---


def latency(study: Study, bench: Workbench, folder: Path) -> Report:
    """Seconds of a round that verifies whole blocks, by sequential head, against none. Untrained drafters suffice."""
    report = Report(clocked=True)
    shapes: dict[str, Any] = {v.name: bench.lab.shape(v.changes) for v in bench.available(study, report)}
    names = list(shapes)
    rows = [["slots", *(f"{name}, ms" for name in names), *(f"{name} / none" for name in names if name != "none")]]
    curves: dict[str, list[tuple[float, Estimate]]] = {name: [] for name in names if name != "none"}
    for slots in bench.slots:

        def measure(slots: int = slots) -> Samples:
            made = {name: untrained(shape, jnp.dtype(bench.lab.clocked.dtype)) for name, shape in shapes.items()}
            return head_rounds(bench.lab.clocked.target, made, slots, bench.context, bench.timing)

        key = {"slots": slots, "shapes": {name: repr(shape) for name, shape in shapes.items()}}
        samples = bench.timed(f"heads-{slots}", key, measure)
        cells = []
        for name in curves:
            middle, low, high = ratio(samples, name, "none")
            cells.append(f"{per_cent(middle - 1, 2)} [{per_cent(low - 1, 2)}, {per_cent(high - 1, 2)}]")
            curves[name].append((slots, Estimate(middle - 1, low - 1, high - 1)))
        rows.append([str(slots), *(f"{1e3 * median(samples[name]):.2f}" for name in names), *cells])
        report.timing_values[str(slots)] = {name: median(samples[name]) for name in names}
    largest = bench.slots[-1]
    for name, points in curves.items():
        here = per_cent(points[-1][1].value, 2)
        report.headlines.append(
            Headline(f"round with the {name} head, longer than without", "0.2 to 1.3 % (128)", f"{here} ({largest})")
        )
    report.timings += [
        f"A round drafts and verifies whole blocks of all slots, with caches of {bench.context} tokens. Ratios are "
        "medians over turns, with their quartiles.",
        tables.markdown_table(rows),
    ]
    report.values["heads"] = names
    folder.mkdir(parents=True, exist_ok=True)
    title = "Overhead of the sequential head (quartiles)"
    places = [(float(slots), str(slots)) for slots in bench.slots]
    report.pictures = [
        draw(
            folder / "latency.png",
            {title: curves},
            "",
            "slots",
            "share of a round without it",
            places=places,
            logarithmic=True,
        )
    ]
    return report


def _draft_times(
    study: Study, bench: Workbench, variants: Sequence[Variant], systems: Mapping[str, System], report: Report
) -> None:
    """Seconds of a draft, by drafter: a round with it less one without."""
    slots = bench.slots[0]
    found = {variant.name: bench.lab.trained(variant.changes) for variant in variants if variant.trained}

    def measure() -> Samples:
        drafters = {name: bench.lab.clocked.drafter(trained) for name, trained in found.items()}
        return draft_rounds(bench.lab.clocked.target, drafters, slots, bench.context, bench.timing)

    key = {"slots": slots, "shapes": {name: repr(trained.config) for name, trained in found.items()}}
    samples = bench.timed(f"drafts-{study.name}-{slots}", key, measure)
    rows = [["drafter", "draft, ms", "draft, share of a plain round"]]
    for name in found:
        share = ratio(samples, name, f"{name} plain")[0] - 1
        seconds = share * median(samples[f"{name} plain"])
        rows.append([name, f"{1e3 * seconds:.2f}", per_cent(share)])
        report.timing_values.setdefault("draft_seconds", {})[name] = seconds
    report.timings += [f"### Drafting, {slots} slots", tables.markdown_table(rows)]


def _coverage(
    study: Study, bench: Workbench, variants: Sequence[Variant], systems: Mapping[str, System], report: Report
) -> None:
    """Share of the answers' tokens that can be drafted."""
    rows = [["drafter", *(f"covered, temperature {protocol.temperature:g}" for protocol in bench.protocols)]]
    shares: dict[str, list[float]] = {name: [] for name in systems}
    for protocol in bench.protocols:
        answers = bench.lab.answered(System(PLAIN, None), bench.benchmarks, protocol)
        tokens = np.concatenate([np.asarray(one.token_ids) for one in answers])
        for name, system in systems.items():
            shares[name].append(float(np.isin(tokens, _vocabulary(system)).mean()))
    for name, row in shares.items():
        rows.append([name, *(per_cent(share, 2) for share in row)])
    report.values["coverage"] = shares
    text = "Share of the tokens of plain decoding's answers that are in the draft vocabulary:"
    report.sections += ["### Coverage", text, tables.markdown_table(rows)]


def _vocabulary(system: System) -> np.ndarray:
    """Ids of the tokens that a system can draft."""
    assert system.drafter is not None
    params, config = system.drafter.params, system.drafter.config
    if "d2t" not in params:
        return np.arange(config.vocab_size)  # type: ignore[union-attr]
    offsets = np.asarray(params["d2t"])
    return offsets + np.arange(len(offsets))


def _cost(
    study: Study, bench: Workbench, variants: Sequence[Variant], systems: Mapping[str, System], report: Report
) -> None:
    """Bytes of the hidden states, and seconds of an update."""
    rows = [["drafter", "bytes a token", "MB in all"]]
    seconds = [["drafter", "seconds of an update"]]
    for variant in variants:
        trained: Trained = bench.lab.trained(variant.changes)
        facts = trained.facts
        rows.append([variant.name, str(facts["bytes_per_token"]), f"{facts['bytes'] / 1e6:.1f}"])
        seconds.append([variant.name, f"{facts['seconds_per_update']:.3f}"])
        report.timing_values.setdefault("seconds_per_update", {})[variant.name] = facts["seconds_per_update"]
    report.sections += ["### Hidden states on the disk", tables.markdown_table(rows)]
    report.timings += ["### Training", tables.markdown_table(seconds)]


_Measure = Callable[[Study, Workbench, Sequence[Variant], Mapping[str, System], Report], None]
_MEASURES: dict[str, _Measure] = {"cost": _cost, "coverage": _coverage, "draft": _draft_times}
