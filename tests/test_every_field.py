"""Every field that a user fills in changes something that a test sees: the tests by class and field.

A test that only sees a bad value refused does not count, but where refusing is all that a field does.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from dspark_jax.calibration.command import CalibrateSettings
from dspark_jax.calibration.sts import STSSettings
from dspark_jax.checkpoints.convert import ConvertSettings
from dspark_jax.data.cache_command import CacheSettings
from dspark_jax.data.regenerate import RegenerateSettings
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.evaluation.ablate_command import AblateSettings
from dspark_jax.evaluation.answering import Protocol
from dspark_jax.evaluation.eval_command import EvalSettings
from dspark_jax.evaluation.simulate_command import SimulateSettings
from dspark_jax.evaluation.simulator import EngineSettings
from dspark_jax.profiling.aot_settings import AotSettings, MeshOption
from dspark_jax.profiling.profile_command import ProfileSettings
from dspark_jax.serving.doctor import DoctorSettings
from dspark_jax.serving.http.schema import ChatBody, ChatMessage, CompletionBody, StreamOptions
from dspark_jax.serving.http.settings import HttpSettings
from dspark_jax.serving.settings import ServeSettings
from dspark_jax.sharding import MeshShape
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings
from tests.conftest import ROOT

Table = dict[str, str]  # the test of each field


def by(test: str, names: str) -> Table:
    """Fields that one test sees."""
    return dict.fromkeys(names.split(), f"tests/{test}")


PREPARED = "training/test_settings.py::test_a_field_changes_what_is_prepared"
STEP = "training/test_settings.py::test_a_field_changes_the_step"
WRITES = "training/test_settings.py::test_fields_say_when_a_run_writes"
PROCESSES = "training/test_distributed.py::test_two_processes_train_the_curve_of_one"
DRAFT = "drafters/test_config_fields.py::test_every_field_changes_the_draft"
CONVERT = "checkpoints/test_convert.py::"
OFFLINE = "serving/test_offline.py::"
LOADED = "serving/test_options.py::test_an_option_changes_what_is_loaded"
SAID = "serving/test_options.py::test_sampling_options_change_what_is_said"
SERVER = "serving/http/test_server.py::"
DOCTOR = "serving/test_doctor.py::"
REGENERATE = "data/test_regenerate.py::"
CACHE = "data/test_cache_command.py::"
PROFILE = "profiling/test_profile_command.py::"
AOT = "profiling/test_aot_command.py::"
CALIBRATE = "calibration/test_command.py::"
SIMULATE = "evaluation/test_simulate_command.py::"
SIMULATOR = "evaluation/test_simulator.py::"
ANSWERING = "evaluation/test_answering.py::"
CHAT = "serving/http/test_chat.py::"
COMPLETIONS = "serving/http/test_completions.py::"
NEUTRAL = "serving/http/test_refusals.py::test_a_neutral_field_takes_no_other_value"

DRAFTERS = (  # what a round does not read
    by(CONVERT + "test_round_trips_between_all_pairs_are_bit_for_bit", "shares_embeddings")
    | by("models/test_drafter_config.py::test_a_target_that_it_was_not_made_for", "num_target_layers vocab_size")
    | by("decoding/test_generate.py::test_near_the_last_position", "max_positions")
)
LAYER = (
    "block_size target_layer_ids draft_vocab_size hidden_size intermediate_size num_heads num_kv_heads "
    "head_dim rms_norm_eps rope qk_norm family shared_kv attention_scale final_softcap"
)
BODY = (
    by("serving/http/test_refusals.py::test_an_unknown_model_is_a_404", "model")
    | by(CHAT + "test_an_answer_may_fill_the_context", "max_tokens")
    | by(COMPLETIONS + "test_seeds", "temperature seed n")
    | by(COMPLETIONS + "test_sampling_fields_reach_the_engine", "top_p top_k min_p")
    | by(COMPLETIONS + "test_stop_strings", "stop")
    | by(COMPLETIONS + "test_stop_tokens", "stop_token_ids")
    | by(COMPLETIONS + "test_a_stream_joins_to_the_whole_answer", "stream")
    | by(COMPLETIONS + "test_usage_comes_last_where_it_is_asked_for", "stream_options")
    | by(COMPLETIONS + "test_plain_decoding_gives_the_same", "speculative trace")
    | by(COMPLETIONS + "test_neutral_values_are_accepted", "user")  # and nothing else is done
    | by(NEUTRAL, "frequency_penalty presence_penalty repetition_penalty logit_bias")
)

TESTS: dict[type[Any], Table] = {
    TrainSettings: by(
        PREPARED,
        "records target output states cache cache_kind drafter epochs steps batch_size pack buckets max_length "
        "min_loss_tokens eval_samples devices mesh",
    )
    | by(
        STEP,
        "loss micro_batches num_anchors lr warmup weight_decay max_grad_norm ema compute_dtype seed remat regather",
    )
    | by(WRITES, "checkpoint_every keep_checkpoints eval_every log_every eval_tokens json")
    | by("training/test_trainer.py::test_a_run_starts_from_an_existing_drafter", "initial")
    | by("training/test_trainer.py::test_a_resumed_run_must_be_the_same", "resume")
    | by(PROCESSES, "distributed coordinator process_count process_id"),
    DrafterSettings: by(
        "training/test_settings.py::test_every_field_of_the_shape_changes_the_drafter",
        "kind block_size num_layers target_layer_ids mask_token_id draft_vocab_size markov_rank markov_kind confidence "
        "confidence_with_markov intermediate_size num_heads num_kv_heads head_dim",
    ),
    LossConfig: by(
        "training/test_losses.py::test_each_term_enters_with_its_weight_and_zero_removes_it", "ce tv confidence"
    )
    | by("training/test_losses.py::test_a_loss_has_the_decay_that_it_is_given", "decay")
    | by("training/test_lk_losses.py::test_each_term_enters_a_batch_with_its_weight", "lk lk_hybrid")
    | by("training/test_lk_losses.py::test_a_term_alone_trains_and_another_eta_is_another_loss", "lk_eta"),
    MeshShape: by("test_sharding.py::test_a_shape_fills_the_devices", "fsdp tensor")
    | by("test_sharding.py::test_a_mesh_that_does_not_divide_the_devices", "data"),  # which the others decide
    DrafterConfig: by(DRAFT, LAYER)
    | by(DRAFT, "num_layers mask_token_id markov_rank markov_kind confidence confidence_with_markov anchor_predicts")
    | by(DRAFT, "confidence_temperatures confidence_biases")
    | DRAFTERS,
    Eagle3Config: by(DRAFT, LAYER + " norm_before_residual") | DRAFTERS,
    MTPConfig: by(DRAFT, LAYER) | DRAFTERS,  # its target_layer_ids are always empty
    NgramConfig: by("decoding/test_drafter_kinds.py::test_lookup_equals_a_plain_loop", "block_size longest shortest"),
    SamplingParams: by(ANSWERING + "test_samples_depend_on_seed_and_turn_alone", "temperature")
    | by(ANSWERING + "test_filters_reach_the_engine", "top_p top_k min_p")
    | by("decoding/test_generate.py::test_seeds", "seed")
    | by("decoding/test_generate.py::test_max_tokens_inside_a_block", "max_tokens"),
    ServeSettings: by(SAID, "prompt temperature top_p top_k min_p seed max_tokens")
    | by(LOADED, "target draft drafter ngram_tokens ngram_longest ngram_shortest data tensor dtype")
    | by(OFFLINE + "test_output_lines_report_and_comparison", "prompts output compare")
    | by(OFFLINE + "test_filter_then_limit_and_plain_decoding", "line_filter limit")
    | by(OFFLINE + "test_shards_share_a_file", "shard")
    | by(OFFLINE + "test_answers_in_the_order_of_the_prompts", "order")
    | by(OFFLINE + "test_stop_strings_cut_text_tokens_and_counts", "stop")
    | by(OFFLINE + "test_settings_reach_the_engine", "batch_size schedule threshold")
    | by(OFFLINE + "test_budgets_measure_their_curve_once_and_refuse_a_foreign_one", "profile")
    | by("serving/test_options.py::test_compile_cache_is_where_programs_go", "compile_cache")
    | by("serving/test_options.py::test_the_demo_is_an_option", "demo")
    | by("serving/test_main.py::test_a_prompt_streams_to_stdout_with_statistics_on_stderr", "json")
    | by(SERVER + "test_options_become_settings", "server"),
    HttpSettings: by(SERVER + "test_settings_reach_the_engine", "max_context")
    | by(SERVER + "test_settings_reach_the_service", "model_name api_key max_logprobs max_waiting max_body rounds")
    | by(SERVER + "test_the_program_warms_up_and_ends_at_once_when_idle", "http drain_seconds warm_up_tokens")
    | by(SERVER + "test_a_signal_lets_running_requests_end", "warm_up"),
    DoctorSettings: by(DOCTOR + "test_a_target_without_a_tokenizer_is_told_and_does_not_run", "target")
    | by(DOCTOR + "test_a_fault_of_the_config", "drafter json")
    | by(DOCTOR + "test_options_change_the_trial", "prompt suspects")
    | by(DOCTOR + "test_a_pair_that_fits_runs_and_is_fine", "max_tokens")
    | by(DOCTOR + "test_weights_have_the_dtype_that_is_asked_for", "dtype")
    | by(DOCTOR + "test_without_arguments_it_looks_at_the_embedded_pair", "run"),
    RegenerateSettings: by(
        REGENERATE + "test_each_prompt_is_answered_at_each_temperature", "output prompts target json"
    )
    | by(REGENERATE + "test_each_prompt_is_answered_at_each_temperature", "max_tokens")
    | by(
        REGENERATE + "test_prompts_are_chosen_by_line_length_and_number",
        "line_filter temperatures max_prompt_tokens limit",
    )
    | by(REGENERATE + "test_the_target_writes_prompts_itself", "self_prompts")
    | by(REGENERATE + "test_sampling_options_change_the_answers", "top_p top_k seed")
    | by(REGENERATE + "test_options_reach_the_engine", "batch_size dtype")
    | by(REGENERATE + "test_a_window_is_sorted_by_length", "window"),
    CacheSettings: by(CACHE + "test_options_come_before_the_config", "records max_length min_loss_tokens")
    | by(CACHE + "test_a_config_is_cached_as_it_was_estimated", "config kind estimate json")
    | by(CACHE + "test_sizes_come_from_a_config_json_a_folder_or_an_option", "target layers tokens samples hidden_size")
    | by(CACHE + "test_qwen3_4b_is_estimated_without_weights_and_network", "mean_length")
    | by(CACHE + "test_shards_share_the_samples", "cache shard")
    | by(CACHE + "test_batch_tokens_are_those_of_a_pass", "batch_tokens"),
    ConvertSettings: by(CONVERT + "test_round_trips_between_all_pairs_are_bit_for_bit", "source output format")
    | by(CONVERT + "test_the_targets_tables_are_left_out_and_put_back", "target")
    | by(CONVERT + "test_command_line", "json"),
    ProfileSettings: by(
        PROFILE + "test_a_run_from_models_to_a_curve", "target drafter slots contexts longest_prompt plot json"
    )
    | by(PROFILE + "test_each_setting_that_changes_times_has_a_file_of_its_own", "sampling dtype")
    | by(PROFILE + "test_a_mesh_has_a_curve_of_its_own", "data tensor")
    | by(PROFILE + "test_timings_are_as_long_and_as_many_as_asked_for", "repeats seconds")
    | by(PROFILE + "test_a_file_of_ones_own_is_written_in_place_of_the_default", "output")
    | by(PROFILE + "test_more_sizes_are_added_to_the_same_file", "again")
    | by(PROFILE + "test_a_topology_is_estimated_and_not_measured", "topology"),
    AotSettings: by(AOT + "test_virtual_cpu_devices", "config topology target_config json")
    | by(
        AOT + "test_an_option_changes_what_is_compiled",
        "mesh micro_batches what batch_size max_length num_anchors remat regather requests context sampling",
    )
    | by(AOT + "test_a_mesh_that_does_not_fit", "hbm")
    | by(AOT + "test_arguments_that_do_not_fit", "suggest"),
    MeshOption: by(AOT + "test_an_option_changes_what_is_compiled", "fsdp tensor")
    | by(AOT + "test_a_mesh_that_does_not_fit", "data"),
    CalibrateSettings: by(CALIBRATE + "test_prompts_become_rounds_of_both_parts", "prompts target records_out")
    | by(
        CALIBRATE + "test_an_option_changes_the_rounds",
        "fit_lines test_lines limit max_tokens temperature batch_size seed dtype",
    )
    | by(CALIBRATE + "test_long_prompts_are_left_out", "max_prompt_tokens")
    | by(CALIBRATE + "test_bins_are_those_of_the_errors", "bins")
    | by(CALIBRATE + "test_biases_are_fitted_beside_temperatures", "biases")
    | by(CALIBRATE + "test_a_run_from_records_to_a_drafter", "drafter records_in write plots json")
    | by(CALIBRATE + "test_an_output_folder_gets_a_copy", "output"),
    STSSettings: by(
        "calibration/test_sts.py::test_every_field_changes_a_fit",
        "low high points bias pair_points refinements bins minimum minimum_each",
    ),
    SimulateSettings: by(
        SIMULATE + "test_an_option_changes_the_results",
        "curve records systems loads rates arrivals requests_per_load warm_up calibration max_tokens slots rounds "
        "prefill_chunk host_seconds resize_seconds threshold mtp_draft_share scale_seconds replicas seed",
    )
    | by(SIMULATE + "test_the_drafter_s_own_calibration_is_applied", "drafter")
    | by(SIMULATE + "test_a_sweep_gives_a_table_a_report_and_pictures", "json plots"),
    EngineSettings: by(SIMULATE + "test_an_option_changes_the_results", "slots")
    | by(SIMULATOR + "test_the_host_looks_after_so_many_rounds", "rounds host_seconds")
    | by(SIMULATOR + "test_pieces_are_as_long_as_the_engine_says", "prefill_chunk")
    | by(SIMULATOR + "test_more_slots_cost_a_copy_each_step_and_shrink_late", "resize_seconds")
    | by(SIMULATOR + "test_threshold_verifies_the_confident_prefix_in_the_smallest_bucket", "threshold")
    | by(SIMULATOR + "test_mtp1_verifies_one_token_and_drafts_for_its_share", "mtp_draft_share"),
    EvalSettings: dict.fromkeys(
        (field.name for field in fields(EvalSettings)),
        "tests/evaluation/test_eval_command.py::test_a_field_changes_what_it_says",
    ),
    AblateSettings: dict.fromkeys(
        (field.name for field in fields(AblateSettings)),
        "tests/evaluation/test_ablate_command.py::test_every_option_changes_something",
    ),
    Protocol: by(ANSWERING + "test_samples_depend_on_seed_and_turn_alone", "temperature seed")
    | by(ANSWERING + "test_filters_reach_the_engine", "top_p top_k min_p")
    | by("evaluation/test_eval_command.py::test_a_field_changes_what_it_says", "max_tokens batch_size method")
    | by(ANSWERING + "test_confidences_along_plain_answers_are_for_the_asking", "confidences"),
    StreamOptions: by(COMPLETIONS + "test_usage_comes_last_where_it_is_asked_for", "include_usage include_obfuscation"),
    ChatMessage: by(CHAT + "test_messages_of_all_kinds", "role content")
    | by(CHAT + "test_a_template_gets_names", "name")
    | by(NEUTRAL, "refusal annotations audio tool_calls function_call"),
    ChatBody: BODY
    | by(CHAT + "test_messages_of_all_kinds", "messages")
    | by(CHAT + "test_a_greedy_answer_is_that_of_plain_decoding", "max_completion_tokens")
    | by(CHAT + "test_logprobs_have_bytes_that_join_to_the_text", "logprobs top_logprobs")
    | by(
        NEUTRAL,
        "tools tool_choice functions function_call response_format modalities audio prediction reasoning_effort "
        "verbosity web_search_options store metadata service_tier",
    )
    | by(CHAT + "test_neutral_values_are_accepted", "parallel_tool_calls safety_identifier prompt_cache_key"),
    CompletionBody: BODY
    | by(COMPLETIONS + "test_prompts_of_all_kinds", "prompt")
    | by(COMPLETIONS + "test_logprobs_are_columns_of_equal_length", "logprobs")
    | by(COMPLETIONS + "test_echo_puts_the_prompt_first", "echo")
    | by("serving/http/test_refusals.py::test_fields_of_completions", "best_of")
    | by(NEUTRAL, "suffix"),
}
ENDINGS = ("Settings", "Config", "Shape", "Params", "Options", "Option", "Protocol")
NOBODY_FILLS_IN = (
    "dspark_jax.models.config.AttentionConfig",  # these three: read from a model's files
    "dspark_jax.models.config.RopeConfig",
    "dspark_jax.models.config.TransformerConfig",
    "dspark_jax.drafters.recurrent.RecurrentConfig",  # what Eagle3Config and MTPConfig have in common
    "dspark_jax.profiling.hlo_text.Shape",  # of an array in a compiled program
    "dspark_jax.serving.http.schema.Strictly",  # these two: what the bodies above have in common
    "dspark_jax.serving.http.schema.Body",
)


def names_of(kind: type[Any]) -> list[str]:
    """A class's fields."""
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind.model_fields)


@functools.cache
def module(file: str) -> dict[str, str]:
    """Source text, decorators included, of what a test module defines at its top level, by name."""
    text = (ROOT / file).read_text()
    found = {}
    for node in ast.parse(text).body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
        for name in names:
            first = min((one.lineno for one in getattr(node, "decorator_list", ())), default=node.lineno)
            lines = text.splitlines()[first - 1 : node.end_lineno]
            found[name] = "\n".join([found.get(name, ""), *lines])
    return found


@functools.cache
def sources(file: str, test: str) -> str:
    """A test's source with that of all tables, fixtures and helpers of its file that it names, or that those name."""
    defined, seen, todo = module(file), set[str](), [test]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += set(re.findall(r"\w+", defined[name])) & set(defined)
    return "\n".join(defined[name] for name in seen)


@pytest.mark.parametrize("kind", TESTS, ids=lambda kind: kind.__name__)
def test_every_field_has_a_test_that_names_it(kind: type[Any]) -> None:
    optional = {"target_layer_ids"} if kind is MTPConfig else set()
    assert set(TESTS[kind]) - optional == set(names_of(kind)) - optional
    for name, place in TESTS[kind].items():
        file, test = place.split("::")
        assert test.startswith("test_") and test in module(file), f"{kind.__name__}.{name}: there is no {place}"
        text = sources(file, test)
        all_of_them = (f"fields({kind.__name__})", f"{kind.__name__}.model_fields", "kind.model_fields")
        named = re.search(rf"\b{name}\b|--(no-)?{name.replace('_', '-')}\b", text)
        assert named or any(part in text for part in all_of_them), f"{kind.__name__}.{name}: {place} does not name it"


def classes() -> Iterator[str]:
    """All settings of the package, and all bodies of requests."""
    for file in sorted((ROOT / "dspark_jax").rglob("*.py")):
        where = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            settings = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
            if (settings and node.name.endswith(ENDINGS)) or where == "dspark_jax.serving.http.schema":
                yield f"{where}.{node.name}"


def test_no_settings_are_left_out() -> None:
    listed = {f"{kind.__module__}.{kind.__qualname__}" for kind in TESTS}
    assert set(classes()) == listed | set(NOBODY_FILLS_IN) and not listed & set(NOBODY_FILLS_IN)


def test_tests_that_are_gone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of another name, and one that does not name the field."""
    for place in ("tests/test_sharding.py::test_gone", "tests/test_sharding.py::test_negative_sizes"):
        table = TESTS[NgramConfig] | {"longest": place}
        monkeypatch.setitem(TESTS, NgramConfig, table)
        with pytest.raises(AssertionError, match="NgramConfig.longest"):
            test_every_field_has_a_test_that_names_it(NgramConfig)
