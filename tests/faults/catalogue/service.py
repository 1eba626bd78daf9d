"""Faults in generation and the server."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "penalty_rewards_negative_logits",
        "megatron/core/inference/sampler.py",
        old="scores * sampling.repetition_penalty)",
        new="scores / sampling.repetition_penalty)",
        suffers="repetition_penalty favours repeated tokens whose logits are negative.",
        first=("unit/inference/test_sampler.py",),
    ),
    Fault(
        "all_choices_are_one",
        "megatron/core/inference/sampler.py",
        old="uniform(request.seed, request.choice, index)",
        new="uniform(request.seed, 0, index)",
        suffers="A request with n choices gets the same text n times.",
        first=("unit/inference/test_sampler.py::numbers_of_their_own",),
    ),
    Fault(
        "whole_prompt_from_the_cache",
        "megatron/core/inference/scheduler.py",
        old="text.keys[: (len(text.tokens) - 1) // self.limits.block_size]",
        new="text.keys[: len(text.tokens) // self.limits.block_size]",
        suffers="A prompt that fills cached blocks exactly has no logits to sample from.",
    ),
    Fault(
        "encoder_left_out_of_the_key",
        "megatron/core/inference/scheduler.py",
        old='block_key(b"", self.request.encoder_prompt)',
        new='block_key(b"", ())',
        suffers="T5 answers a question with the cached answer to another one.",
        first=("unit/inference/test_scheduler.py::other_questions",),
    ),
    Fault(
        "stop_text_across_tokens_missed",
        "megatron/core/inference/stop_strings.py",
        old="text.find(each, max(0, num_held + 1 - len(each)))",
        new="text.find(each, num_held)",
        suffers="A stop text that two tokens spell doesn't stop the answer.",
    ),
    Fault(
        "banned_word_begins_anywhere",
        "megatron/core/inference/edits.py",
        old="for token in reversed(word[:-1]):",
        new="for token in word[:-1]:",
        suffers="bad_words of three tokens and more are generated.",
    ),
    Fault(
        "evicted_block_is_still_found",
        "megatron/core/inference/block_pool.py",
        old=("            self.forget([evicted])\n"),
        new="",
        suffers="A prompt is continued from keys and values that another text has overwritten.",
        first=("unit/inference/test_block_pool.py",),
    ),
    Fault(
        "any_key_opens",
        "megatron/serving/middleware.py",
        old='return scheme.lower() == "bearer" and any(found)',
        new='return scheme.lower() == "bearer"',
        suffers="A server with --api-key answers everybody.",
        first=("unit/serving/test_bad_requests.py", "unit/serving/test_clients.py", "unit/serving/test_processes.py"),
    ),
    Fault(
        "answers_of_another_prompt",
        "megatron/serving/completions.py",
        old="self.choice(index, update, index // self.call.choices)",
        new="self.choice(index, update, index % self.call.choices)",
        suffers="Streams of several prompts echo the wrong prompt.",
        first=("unit/serving/test_completions.py",),
    ),
    Fault(
        "scored_prompts_unbounded",
        "megatron/serving/generating.py",
        old="if count > _MOST_SCORED:",
        new="if count > _MOST_SCORED**2:",
        suffers="One request for log-probabilities of long prompts fills the server's memory.",
        first=("unit/serving/test_completions.py::scored_prompts",),
    ),
    Fault(
        "waiting_work_unbounded",
        "megatron/serving/work.py",
        old="if self._unfinished >= _MOST_WAITING:",
        new="if self._unfinished >= 1000 * _MOST_WAITING:",
        suffers="Large requests pile up in memory without an error for any of them.",
        first=("unit/serving/test_large_requests.py", "unit/serving/test_many_clients.py"),
    ),
    Fault(
        "late_answer_to_the_next_question",
        "megatron/serving/bounded_process.py",
        old="            if not said:  # also",
        new="            if said is None:  # also",
        suffers="A template that took too long answers the next request's.",
        first=("unit/serving/test_processes.py", "unit/serving/test_grammars.py"),
    ),
    Fault(
        "strangers_templates_run",
        "megatron/serving/chat.py",
        old='if fields["chat_template"] is not None and not trust_templates:',
        new='if fields["chat_template"] is not None and trust_templates is None:',
        suffers="A request's own template runs without --trust-request-chat-template.",
        first=("unit/serving/test_chat.py",),
    ),
)
