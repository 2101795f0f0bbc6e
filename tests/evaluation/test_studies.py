"""The studies as data: variants that a real target has, losses that train them, pairs that are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dspark_jax.evaluation.benchmarks import KNOWN
from dspark_jax.evaluation.studies import DFLASH, DSPARK, STUDIES, Study, Variant, changed, chosen, only
from dspark_jax.evaluation.study_kinds import KINDS
from dspark_jax.models.config import RopeConfig, TransformerConfig
from dspark_jax.training.objectives import check_loss
from dspark_jax.training.settings import DrafterSettings, TrainSettings, drafter_config
from dspark_jax.training.trainer import read_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TARGET = TransformerConfig(
    vocab_size=49152,
    num_tokens=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
    qk_norm=False,
    max_positions=8192,
    family="llama",
)
BASE = read_config(CONFIGS / "dspark_smollm2_135m.py")
ALL = [(study, variant) for study in STUDIES.values() for variant in study.variants]


@pytest.mark.parametrize(("study", "variant"), ALL, ids=[f"{study.name}-{variant.name}" for study, variant in ALL])
def test_every_variant_is_a_drafter_that_can_be_trained(study: Study, variant: Variant) -> None:
    settings = changed(BASE, variant.changes)
    config = drafter_config(settings.drafter, TARGET)
    check_loss(config, settings.loss)
    config.check_target(TARGET)


@pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
def test_studies_are_whole(study: Study) -> None:
    names = [variant.name for variant in study.variants]
    assert len(set(names)) == len(names) and study.kind in KINDS and study.paper and study.question
    for pair in study.pairs:
        assert set(pair) <= set(names) and pair[0] != pair[1]
    places = [(variant.series, variant.x) for variant in study.variants]
    assert not study.axis or len(set(places)) == len(places)


def test_variants_differ_in_what_is_compared_and_in_nothing_else() -> None:
    """The reference of each study is the config itself, so that studies share it."""
    shared = {name: [v.name for v in s.variants if changed(BASE, v.changes) == BASE] for name, s in STUDIES.items()}
    assert shared["main"] == ["plain", "ngram", DSPARK]
    assert shared["depth"] == ["dspark, 2 layers"] and shared["head"] == ["vanilla"]
    assert shared["block"] == ["vanilla, gamma 7"] and shared["vocab"] == ["8192"]
    assert shared["loss"] == ["0.3 CE + 0.9 TV"] and shared["positions"] == [DSPARK]
    for study, variant in ALL:
        settings = changed(BASE, variant.changes)
        for name in ("records", "seed", "steps", "batch_size", "num_anchors", "max_length", "lr", "ema"):
            assert getattr(settings, name) == getattr(BASE, name), (study.name, variant.name)
        if settings.drafter.kind == "eagle3":
            assert settings.drafter.target_layer_ids == BASE.drafter.target_layer_ids  # one cache for all


def test_dflash_is_what_its_config_says() -> None:
    mine = changed(read_config(CONFIGS / "dspark_qwen3_4b.py"), _variant("main", DFLASH).changes)
    theirs = read_config(CONFIGS / "dflash_qwen3_4b.py")
    assert (mine.drafter, mine.loss) == (theirs.drafter, theirs.loss)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_other_kinds_are_what_their_configs_say(kind: str) -> None:
    base, theirs = read_config(CONFIGS / "dspark_qwen3_4b.py"), read_config(CONFIGS / f"{kind}_qwen3_4b.py")
    mine = changed(base, _variant("main", kind).changes)
    assert mine.loss == theirs.loss
    target = TransformerConfig(**(vars(TARGET) | {"num_layers": 36, "vocab_size": 151936}))
    assert drafter_config(mine.drafter, target) == drafter_config(theirs.drafter, target)


def _variant(study: str, name: str) -> Variant:
    return next(variant for variant in STUDIES[study].variants if variant.name == name)


def test_a_study_of_some_variants_keeps_their_pairs() -> None:
    block = STUDIES["block"]
    some = only(block, ("vanilla*", "none, gamma 7"))
    assert [one.name for one in some.variants] == [*(f"vanilla, gamma {n}" for n in (3, 7, 11, 15)), "none, gamma 7"]
    assert some.pairs == (("vanilla, gamma 7", "none, gamma 7"),)
    assert only(block, ()) == block and only(STUDIES["main"], ("none*",)) == STUDIES["main"]
    with pytest.raises(
        ValueError, match=r"variants rnn\?: match none of study head, which has vanilla; gated; rnn; none"
    ):
        only(STUDIES["head"], ("rnn?",))


def test_the_paper_s_table_has_the_benchmarks_of_this_project() -> None:
    heads = STUDIES["main"].paper.splitlines()[0].strip("| ").split(" | ")[2:]
    assert len(heads) == len(KNOWN) == 9
    rows = [line.strip("| ").split(" | ") for line in STUDIES["main"].paper.splitlines()[2:8]]
    assert all(len(row) == 11 for row in rows)
    lengths = {(row[0], row[1]): [float(cell) for cell in row[2:]] for row in rows}
    for other, gain in (("Eagle3", 0.309), ("DFlash", 0.163)):  # the paper's macro gains follow from its table
        ratio = sum(lengths["Qwen3-4B", "DSpark"]) / sum(lengths["Qwen3-4B", other])
        assert ratio - 1 == pytest.approx(gain, abs=5e-4)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"lr": 0.5}, TrainSettings(lr=0.5)),
        ({"drafter.num_layers": 1, "seed": 3}, TrainSettings(drafter=DrafterSettings(num_layers=1), seed=3)),
        ({}, TrainSettings()),
    ],
)
def test_dotted_fields_take_the_place_of_the_config_s(changes: dict, wanted: TrainSettings) -> None:
    assert changed(TrainSettings(), changes) == wanted


@pytest.mark.parametrize("name", ["depth", "drafter.depth", "layers.drafter"])
def test_a_field_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: no field of a training run"):
        changed(TrainSettings(), {name: 1})


def test_studies_are_chosen_by_name_in_their_order() -> None:
    assert [study.name for study in chosen(("loss", "main"))] == ["main", "loss"]
    assert chosen(("all",)) == list(STUDIES.values()) == chosen(("main", "all"))
    for names in ((), ("mian",), ("main", "mian")):
        with pytest.raises(ValueError, match="must be of main, depth"):
            chosen(names)


def test_no_study_names_a_field_that_training_does_not_have() -> None:
    """Dotted names are literals: a renamed field is found here."""
    source = (CONFIGS.parent / "dspark_jax" / "evaluation" / "studies.py").read_text()
    literals = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    dotted = [
        x for x in literals if isinstance(x, str) and x.split(".")[0] in ("drafter", "loss") and x.count(".") == 1
    ]
    assert len(dotted) > 8
    for name in dotted:
        changed(BASE, {name: getattr(getattr(BASE, name.split(".")[0]), name.split(".")[1])})
