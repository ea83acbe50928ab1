"""Every behaviour that Apprentice promises: what is promised, where it is promised, and the tests that show it.

`tests/test_manifest.py` checks that each named test exists. A promise without a test does not belong in the README.
"""

from __future__ import annotations

from typing import NamedTuple


class Promise(NamedTuple):
    """`tests` are `file::function`, relative to tests/."""

    id: str
    says: str
    source: str
    tests: tuple[str, ...]


CLIENT, SERVER, ENGINES, TRAINING = "core/client", "core/server", "core/engines", "core/training"
MCP = "integrations/mcp"

MANIFEST: tuple[Promise, ...] = (
    Promise(
        "exact-tokens",
        "what is trained is byte-equal to what was sampled, in the context it was sampled in",
        "README",
        (
            "core/test_exact_tokens.py",
            f"{SERVER}/test_splice.py::test_the_next_prompt_is_the_last_one_and_exactly_what_was_sampled",
            f"{SERVER}/test_gateway.py::test_a_reply_says_who_sampled_it_and_the_ledger_holds_exactly_what_it_shows",
        ),
    ),
    Promise(
        "provenance",
        "a turn that was edited, repaired or sampled by another tokenizer is never taken for a sample",
        "docs/server.md",
        (
            f"{SERVER}/test_splice.py::test_an_edited_turn_is_shown_as_edited_and_the_history_counts_as_rewritten",
            f"{SERVER}/test_splice.py::test_repaired_broken_json_is_no_sampled_turn",
            f"{SERVER}/test_splice.py::test_ids_of_another_tokenizer_are_never_spliced",
        ),
    ),
    Promise(
        "unparsable-kept",
        "a reply that does not parse comes back as text, with the reason, and is kept",
        "README",
        (f"{SERVER}/test_gateway.py::test_a_call_that_does_not_parse_comes_back_as_text_with_the_reason",),
    ),
    Promise(
        "branches-explained",
        "the server says of every branch why it branched",
        "docs/server.md",
        (
            f"{SERVER}/test_splice.py::test_thinking_that_the_template_strips_branches_and_says_so",
            f"{SERVER}/test_splice.py::test_dropped_first_messages_are_a_truncation",
            f"{SERVER}/test_splice.py::test_same_prompts_are_retries_of_one_caller_and_siblings_of_two",
        ),
    ),
    Promise(
        "streams-add-up",
        "a stream's deltas add up to the reply that is not streamed",
        "docs/server.md",
        (f"{SERVER}/test_gateway.py::test_a_stream_adds_up_to_the_same_reply", f"{SERVER}/test_reply_stream.py"),
    ),
    Promise(
        "openai-clients",
        "the official Python and npm clients work, streamed and not, with tools",
        "docs/server.md",
        (
            f"{SERVER}/test_openai_clients.py::test_python_runs_a_tool_and_sends_the_result_back",
            f"{SERVER}/test_openai_clients.py::test_the_npm_client_works_streamed_and_not_with_tools",
        ),
    ),
    Promise(
        "no-5xx-from-input",
        "no request makes the server fail",
        "docs/server.md",
        (f"{SERVER}/test_schemathesis.py", f"{SERVER}/test_gateway_bad_input.py"),
    ),
    Promise(
        "unknown-model-404",
        "an unknown model is refused, never replaced",
        "docs/server.md",
        (f"{SERVER}/test_train_jobs.py::test_a_pinned_version_answers_as_it_did_before_training",),
    ),
    Promise(
        "newest-version",
        "the alias is the newest version at each request; a pinned name is not",
        "README",
        (f"{SERVER}/test_gateway.py::test_the_alias_is_the_newest_version_at_each_request_and_a_pinned_name_is_not",),
    ),
    Promise(
        "committed-before-reply",
        "a call is committed before its reply leaves, and a ledger that cannot write gives an error",
        "README",
        (
            f"{SERVER}/test_gateway.py::test_a_ledger_that_cannot_write_gives_an_error_and_no_reply",
            f"{SERVER}/test_ledger_failures.py::test_a_writer_killed_in_a_burst_loses_no_append_that_returned_and_doubles_none",
            "core/test_random_kills.py",
        ),
    ),
    Promise(
        "full-or-locked",
        "a full disk, a locked file, a newer version or damage is one sentence",
        "DESIGN 12",
        (
            f"{SERVER}/test_ledger_failures.py::test_a_full_file_system_is_a_full_disk_and_writing_goes_on_when_there_is_room",
            f"{SERVER}/test_ledger_failures.py::test_a_second_server_on_the_same_ledger_is_told_who_has_it",
            f"{SERVER}/test_ledger_failures.py::test_a_ledger_of_a_newer_version_is_refused_with_both_versions_and_left_as_it_is",
        ),
    ),
    Promise(
        "linear-growth",
        "an N-turn rollout costs O(N) bytes",
        "README",
        (f"{SERVER}/test_ledger_storage.py::test_a_rollout_twice_as_long_takes_about_twice_the_bytes",),
    ),
    Promise("export", "an export keeps ids and log-probabilities exactly", "README", (f"{SERVER}/test_export.py",)),
    Promise(
        "job-resume",
        "a job killed between any two phases ends in the same weights, bit for bit",
        "README",
        (f"{SERVER}/test_train_jobs.py::test_a_job_killed_as_a_phase_begins_ends_in_the_same_weights_bit_for_bit",),
    ),
    Promise(
        "no-silent-no-op",
        "equal rewards update nothing, and every trajectory has a fate",
        "README",
        (f"{SERVER}/test_train_jobs.py::test_equal_rewards_update_nothing_and_say_so",),
    ),
    Promise("canary", "an engine that does not serve the new weights fails the job", "README", (f"{SERVER}/test_canary.py",)),
    Promise(
        "checkpoint-integrity",
        "a damaged checkpoint is found and never served",
        "docs/architecture.md",
        (
            f"{SERVER}/test_train_jobs.py::test_a_checkpoint_with_a_flipped_byte_is_not_served",
            f"{TRAINING}/test_checkpoints.py::test_every_single_flipped_byte_is_found",
            f"{TRAINING}/test_checkpoints.py::test_killed_at_any_moment_an_action_has_happened_wholly_or_not_at_all",
        ),
    ),
    Promise("plain-peft", "an adapter folder is plain PEFT format", "README", (f"{TRAINING}/test_policy.py",)),
    Promise(
        "forest-equals-rows",
        "loss and gradients of forest training equal row-by-row training on any tree",
        "README",
        (
            f"{TRAINING}/test_forest_attention.py::test_forest_equals_sample_by_sample_in_float64_for_an_adapter_on_a_frozen_base",
            f"{TRAINING}/test_forest_attention.py::test_forest_equals_sample_by_sample_in_fp32",
            f"{TRAINING}/test_forest_attention.py::test_micro_batches_add_up_to_the_same_gradient",
        ),
    ),
    Promise(
        "objectives",
        "objectives and advantages equal TRL's numbers",
        "docs/training.md",
        (f"{TRAINING}/test_objectives.py", f"{TRAINING}/test_advantages.py"),
    ),
    Promise(
        "sampler-equals-trainer",
        "sampler and trainer agree on log-probabilities within 1e-4 in fp32",
        "README",
        ("core/test_exact_tokens.py", f"{SERVER}/test_train_jobs.py::test_a_job_moves_the_step_and_says_what_became_of_every_trajectory"),
    ),
    Promise("engine-contract", "every engine keeps one contract", "docs/architecture.md", (f"{ENGINES}/test_contract.py",)),
    Promise(
        "prefix-reuse",
        "shared prompts and earlier turns are read once",
        "README",
        (
            f"{ENGINES}/test_embedded.py::test_a_group_reads_its_shared_prompt_once",
            f"{ENGINES}/test_embedded.py::test_the_next_turn_reads_only_what_is_new",
        ),
    ),
    Promise("base-models", "a base model that cannot be used is refused with one sentence", "README", (f"{TRAINING}/test_base_models.py",)),
    Promise("loop-resume", "the training loop goes on after a kill at any arrow", "README", (f"{CLIENT}/test_training_loop.py",)),
    Promise(
        "failures-are-no-zeros", "a failed rollout is reported and is no zero reward", "docs/from-art.md", (f"{CLIENT}/test_gather.py",)
    ),
    Promise(
        "server-ends-with-parent", "the local server ends with its parent, however that ends", "README", (f"{CLIENT}/test_local_server.py",)
    ),
    Promise("local-first", "any bind but loopback needs a key", "README", (f"{SERVER}/test_auth.py",)),
    Promise("command-line", "errors of the command are one sentence and exit code 2", "README", ("test_cli.py",)),
    Promise("docs-are-true", "tables, links and code of the docs agree with the code", "CONTRIBUTING", ("test_docs.py",)),
    Promise(
        "mcp-tools-readable",
        "any server's tools become functions whose names lead back, with schemas that a model can read",
        "docs/mcp.md",
        (f"{MCP}/test_tools.py",),
    ),
    Promise(
        "mcp-honest-outcomes",
        "a failure that a server calls a success is told apart, and a normal result is not taken for one",
        "docs/mcp.md",
        (f"{MCP}/test_results.py", f"{MCP}/test_hostile_servers.py::test_failures_called_successes_are_told_apart"),
    ),
    Promise(
        "mcp-hostile-servers",
        "nothing that an MCP server does breaks a rollout or leaves a process behind",
        "docs/mcp.md",
        (f"{MCP}/test_hostile_servers.py",),
    ),
    Promise(
        "mcp-captured", "`captured(transport)` records every tool call and changes nothing else", "docs/mcp.md", (f"{MCP}/test_capture.py",)
    ),
    Promise("mcp-proxy", "the proxy is the server to its host, and records every tool call", "docs/mcp.md", (f"{MCP}/test_proxy.py",)),
    Promise(
        "mcp-same-events",
        "a task leaves the same tool events by our loop, captured, and through the proxy",
        "docs/mcp.md",
        (f"{MCP}/test_same_events.py",),
    ),
    Promise(
        "mcp-langchain",
        "an environment's tools in LangChain are told, called and recorded as by our own loop, and no failure is an exception",
        "docs/mcp.md",
        (f"{MCP}/test_langchain.py",),
    ),
    Promise(
        "mcp-specs",
        "a server is a command, a URL or an entry of an mcpServers file; what is wrong names key and line",
        "docs/mcp.md",
        (f"{MCP}/test_spec.py",),
    ),
    Promise(
        "mcp-secrets",
        "no secret of a server's configuration is in a reply, a recorded message, a report, an error or a log",
        "docs/mcp.md",
        (
            f"{MCP}/test_spec.py::test_no_secret_is_in_what_may_be_shown",
            f"{MCP}/test_spec.py::test_the_sdks_loggers_write_no_secret_while_a_session_is_open",
            f"{MCP}/test_session.py::test_a_secret_is_in_no_reply_no_frame_and_no_log",
            f"{MCP}/test_session.py::test_a_refused_token_is_told_without_the_token",
        ),
    ),
    Promise(
        "mcp-repairs",
        "servers with faults that can be put right work, and every repair is told",
        "docs/mcp.md",
        (
            f"{MCP}/test_recorded_transport.py",
            f"{MCP}/test_session.py::test_servers_with_faults_that_can_be_put_right_work_and_the_repair_is_told",
        ),
    ),
    Promise(
        "mcp-one-sentence",
        "a server that cannot be used says why in one sentence",
        "docs/mcp.md",
        (
            f"{MCP}/test_session.py::test_a_server_that_cannot_be_used_is_one_sentence",
            f"{MCP}/test_session.py::test_what_http_says_instead_of_mcp_is_told",
            f"{MCP}/test_session.py::test_a_certificate_that_cannot_be_trusted_is_told",
        ),
    ),
    Promise(
        "mcp-isolation",
        "rollouts on stateful servers at the same time do not see each other, and equal runs leave an equal state",
        "docs/mcp.md",
        (
            f"{MCP}/test_environment.py::test_rollouts_on_sqlite_and_memory_at_the_same_time_do_not_see_each_other",
            f"{MCP}/test_environment.py::test_two_runs_that_did_the_same_have_the_same_state_and_others_another",
        ),
    ),
    Promise(
        "mcp-nothing-left",
        "no server, child of a server or private folder is left, also when the trainer is killed",
        "docs/mcp.md",
        (
            f"{MCP}/test_session.py::test_a_killed_trainer_leaves_no_server_no_child_and_no_folder",
            f"{MCP}/test_session.py::test_children_that_outlive_their_server_are_ended_with_the_session",
            f"{MCP}/test_environment.py::test_200_rollouts_in_a_row_leave_no_process_no_file_and_no_growing_memory",
        ),
    ),
    Promise(
        "mcp-scenarios",
        "scenarios are executed before they are kept, run afresh, and the held-out part shares no value and no wording with training",
        "docs/mcp.md",
        (
            f"{MCP}/test_synthesize.py::test_scenarios_run_afresh_pass_their_check_and_share_nothing_between_the_parts",
            f"{MCP}/test_scenarios.py::test_whatever_the_scenarios_the_parts_share_no_value_and_no_wording_unless_it_is_said",
            f"{MCP}/test_requests.py::test_every_value_stands_in_the_request_and_no_tool_is_named",
        ),
    ),
    Promise(
        "mcp-harmless",
        "exploring changes nothing, and tasks write only where what is written is private and thrown away",
        "docs/mcp.md",
        (
            f"{MCP}/test_synthesize.py::test_exploring_changes_nothing",
            f"{MCP}/test_synthesize.py::test_servers_that_are_shared_or_reach_out_are_never_written_to",
            f"{MCP}/test_synthesize.py::test_which_tools_may_be_called_to_look_around",
        ),
    ),
    Promise(
        "mcp-checks",
        "an attempt is judged by the state and the results it reached, whatever the way, and no answer passes without the calls",
        "docs/mcp.md",
        (f"{MCP}/test_checks.py",),
    ),
    Promise("thin-client", "`import apprentice` needs only httpx and pydantic", "DESIGN 2", ("test_import_rules.py",)),
)
