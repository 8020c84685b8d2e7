"""What other engines were reported to do wrong in scheduling, sampling and text, and the tests of the right outcome.

The table is a promise: a test named in it may be renamed here as well, and not vanish.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

REPORTS: dict[str, tuple[str, ...]] = {
    "vllm#7283 an empty prompt kills the server": (
        "server/test_conformance.py::test_a_bad_completion_is_refused_by_name",
        "engine/test_serving.py::test_the_conformance_table_holds_with_the_real_worker",
        "core/test_scheduler.py::test_what_cannot_be_a_request_is_refused_by_name",
    ),
    "vllm#39734 #52530 #56028 #15996 a request that fits the context and not the pool waits or recomputes for ever": (
        "engine/test_serving.py::test_the_boundary_of_the_pool_refuses_with_both_numbers_or_ends_with_length",
        "core/test_scheduler.py::test_a_request_is_refused_only_when_the_prompt_and_one_more_token_never_fit",
        "core/test_scheduler_machine.py::TestSchedulerMachine",
    ),
    "vllm#16832 #9342 #41951 preemption loses output, crashes, or loses a place in the queue": (
        "engine/test_exact.py::test_no_schedule_changes_a_bit_of_any_logit",
        "engine/test_exact.py::test_the_fuzzer_sees_preemption_and_prefix_hits",
        "engine/test_serving_scores.py::test_samples_are_reproducible_where_a_pool_is_too_small_for_all_of_them",
        "core/test_scheduler.py::test_the_youngest_is_preempted_and_finishes_with_the_same_tokens",
        "core/test_scheduler.py::test_a_prompt_is_scored_once_and_completely_whatever_is_cached_or_preempted",
        "core/test_scheduler_machine.py::TestSchedulerMachine",
    ),
    "vllm#7845 tenstorrent/vllm#415 a cached prefix changes the answer": (
        "engine/test_exact.py::test_no_schedule_changes_a_bit_of_any_logit",
        "engine/test_llm.py::test_logprobs_of_prompt_and_output_are_those_of_transformers",
        "engine/test_serving_scores.py::test_lm_evals_loglikelihoods_are_those_of_transformers",
        "core/test_scheduler.py::test_a_known_prefix_is_not_computed_again_except_its_last_token",
        "core/test_kv_blocks.py::test_only_a_full_block_can_be_registered",
    ),
    "openvino.genai#3722 vllm#44701 colliding hashes share a block": (
        "core/test_kv_blocks.py::test_a_colliding_digest_is_a_miss",
        "core/test_kv_blocks.py::test_roots_differ_by_model_and_by_salt",
        "core/test_scheduler.py::test_another_salt_shares_nothing",
    ),
    "vllm#3672 #3572 #3574 #2577 #3026 a stop string across tokens leaks": (
        "core/test_detokenizer.py::test_a_stop_string_across_tokens_does_not_leak_and_nothing_else_is_delayed",
        "core/test_detokenizer_real.py::test_text_stops_before_any_stop_string_and_waits_for_no_other_reason",
        "engine/test_serving.py::test_any_part_of_the_text_can_be_a_stop_string",
        "server/test_logprobs.py::test_a_stream_has_the_scores_of_the_whole_beside_their_text",
    ),
    "vllm#11089 #13087 empty first chunks": (
        "server/test_answers.py::test_a_stream_is_the_whole_text_and_tears_no_character",
        "server/test_answers.py::test_no_chunk_of_a_chat_is_empty_but_the_first_and_the_last",
    ),
    "vllm#45636 text is held back though no stop string begins there": (
        "core/test_detokenizer.py::test_text_waits_only_while_it_is_the_beginning_of_a_stop_string",
        "core/test_detokenizer_real.py::test_text_stops_before_any_stop_string_and_waits_for_no_other_reason",
    ),
    "llama.cpp#4446 exo#1691 tt-inference-server#2594 split characters in a stream": (
        "core/test_detokenizer_real.py::test_a_character_leaves_with_its_last_byte_and_never_torn",
        "core/test_detokenizer_real.py::test_any_tokens_stream_to_the_whole_text",
        "core/test_detokenizer.py::test_bytes_that_never_become_a_character_come_out_at_the_end",
        "engine/test_serving.py::test_characters_that_are_several_tokens_stream_whole",
    ),
    "vllm#6626 log-probabilities of parts of characters": (
        "server/test_logprobs.py::test_a_chats_tokens_are_its_bytes",
        "core/test_detokenizer_real.py::test_spelled_alone_a_token_is_its_bytes",
    ),
    "vllm#14326 an aborted request with n > 1 leaves rows running": (
        "engine/test_serving_scores.py::test_a_client_that_leaves_frees_every_sample",
        "engine/test_serving_failures.py::test_the_samples_beside_a_failed_one_do_not_run_on",
        "server/test_answers.py::test_a_row_does_not_go_on_behind_its_stop_string",
    ),
    "vllm#32442 #23697 a disconnect, or an id used twice, ends somebody else's request": (
        "engine/test_serving.py::test_clients_that_leave_free_their_blocks",
        "server/test_answers.py::test_requests_that_call_themselves_alike_are_two",
        "core/test_scheduler.py::test_an_abort_frees_at_once_whether_running_or_waiting",
        "core/test_scheduler.py::test_a_request_aborted_during_its_step_gets_no_token",
    ),
    "sglang#28153 vllm#1623 #641 #4151 a temperature that is no number, or tiny": (
        "server/test_bodies.py::test_numbers_that_are_none_name_their_field",
        "engine/test_llm.py::test_a_parameter_out_of_range_is_named",
        "engine/test_sampler.py::test_greedy_and_tiny_temperatures_take_the_best",
        "engine/test_sampler.py::test_any_legal_parameters_give_a_token",
        "engine/test_serving_scores.py::test_every_legal_combination_is_answered_in_finite_numbers",
    ),
    "vllm#22180 greedy rows are divided by a made-up temperature": (
        "engine/test_sampler.py::test_a_row_is_drawn_alike_whatever_stands_beside_it",
    ),
    "sglang#4574 a schema that is none kills the scheduler": (
        "server/test_conformance.py::test_a_bad_completion_is_refused_by_name",
    ),
    "sglang#23141 a mixture of requests violates an assertion of the loop": (
        "server/test_conformance.py::test_no_field_of_any_kind_breaks_the_server",
        "engine/test_serving_scores.py::test_every_legal_combination_is_answered_in_finite_numbers",
        "engine/test_serving_failures.py::test_an_exception_in_one_samples_row_fails_that_request_alone",
        "engine/test_failing_alone.py::test_an_exception_in_one_rows_sampling_ends_only_that_request",
        "core/test_scheduler_machine.py::TestSchedulerMachine",
    ),
}
"""Report to tests. A repository without an owner is that of the project of the name."""


@pytest.mark.parametrize("report", REPORTS)
def test_every_reported_fault_has_its_tests(report: str) -> None:
    for name in REPORTS[report]:
        file, _, test = name.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        defined = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assigned = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert test in defined | assigned, name
