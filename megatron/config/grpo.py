"""Reinforcement learning with verifiable rewards: GRPO and its variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import override

from megatron.config.family import Rule
from megatron.config.flags import flag, switch
from megatron.config.objective import ObjectiveConfig
from megatron.config.rules.sentence import changed_flags, rule
from megatron.config.run import RunConfig
from megatron.errors import ConfigError


@dataclass(frozen=True)
class RewardSettings:
    """A function that gives rewards, FILE.py:NAME, and the limits of a call and of its process."""

    function: str
    seconds: float
    gigabytes: float

    @property
    def flag(self) -> str:
        """The flag that names it, for messages."""
        return f"--reward-function {self.function}"

    @property
    def place(self) -> tuple[Path, str]:
        """File and name of the function; raises ConfigError where there is no such file."""
        place, colon, name = self.function.rpartition(":")
        if not colon or not name.isidentifier():
            raise ConfigError(f"{self.flag} names no function; give FILE.py:NAME, such as rewards.py:reward")
        path = Path(place)
        if not path.is_file():
            raise ConfigError(f"{self.flag}: there is no file {path}; name one that defines {name}")
        return path, name


def _implied(is_on: bool) -> Mapping[str, Any]:
    return {"packing": "best-fit", "attention_dropout": 0.0, "hidden_dropout": 0.0} if is_on else {}


class GRPOConfig(ObjectiveConfig):
    """Learning from the model's own answers, which a function of the user's rates (GRPO, arXiv:2402.03300)."""

    module: ClassVar[str] = "megatron.core.objectives.grpo"

    perform_rl_step: bool = switch(
        "Train with GRPO: the model answers prompts, --reward-function rates the answers, and those better than others "
        "to the same prompt become likelier.",
        aliases=("--grpo",),
        implies=_implied,
    )
    grpo_prompts: tuple[str, ...] = flag(
        'Files of JSON lines, a prompt each: "prompt" (a text, or messages) or "messages"; other fields go to '
        "--reward-function.",
        default=(),
    )
    grpo_eval_prompts: tuple[str, ...] = flag(
        "Files of held-out prompts with the fields of --grpo-prompts: the model answers each once before the first "
        "step, every --eval-interval steps and after the last, and the mean reward is reported.",
        default=(),
    )
    grpo_eval_temperature: float = flag(
        "Temperature of answers to --grpo-eval-prompts; 0: always the likeliest token.", default=0.0, at_least=0
    )
    reward_function: str | None = flag(
        "FILE.py:NAME of a function that is called with the lists prompts and completions, and a list for each other "
        "field of the prompts, and returns a list with a number for each completion; None leaves one out.",
        default=None,
    )
    reward_timeout: float = flag("Seconds that one call of --reward-function may take.", default=60.0, above=0)
    reward_memory_gb: float = flag(
        "Memory of the process of --reward-function in GiB of address space.", default=8.0, above=0
    )
    grpo_prompts_per_step: int = flag("Prompts that are answered at a time.", default=32, at_least=1)
    grpo_group_size: int = flag("Answers to each prompt, which are compared with each other.", default=2, at_least=2)
    grpo_iterations: int = flag(
        "How often each answer is learned from before new ones are made.", default=2, at_least=1
    )
    grpo_loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = flag(
        "Mean of the loss: over tokens of each answer and then over answers (grpo), over --grpo-max-new-tokens for "
        "each answer (dr_grpo), over tokens of a step (bnpo), or over as many as a step has on average (dapo).",
        default="grpo",
        refused_values=dict.fromkeys(
            ("cispo", "sapo", "luspo", "vespo"), "choose grpo, dr_grpo, dapo or bnpo, which clip ratios of tokens"
        ),
    )
    grpo_scale_rewards: Literal["group", "batch", "none"] = flag(
        "What rewards less their group's mean are divided by: the standard deviation of the group, that of all answers "
        "made at a time, or nothing.",
        default="group",
    )
    grpo_clamp_eps_lower: float = flag(
        "How far below 1 the ratio of a token's probability to that when it was generated counts.",
        default=0.01,
        at_least=0,
        at_most=1,
    )
    grpo_clamp_eps_upper: float = flag("The same above 1.", default=0.01, at_least=0)
    grpo_kl_beta: float = flag(
        "Factor of the divergence from the initial model; 0 needs no second copy of the weights.",
        default=0.001,
        at_least=0,
    )
    grpo_use_bias_correction_kl: bool = flag(
        "Multiply the divergence by the ratio of a token's probability to that when it was generated, so that its "
        "gradient is unbiased; trl's use_bias_correction_kl.",
        default=False,
    )
    grpo_entropy_term_weight: float = flag(
        "Factor of a bonus for entropy, -p log p of each token generated.", default=0.0, at_least=0
    )
    grpo_max_new_tokens: int = flag(
        "Most tokens of an answer.", default=256, at_least=1, aliases=("--max-completion-length",)
    )
    rl_default_temperature: float = flag(
        "Temperature of the probabilities that answers are sampled from and the loss is computed of.",
        default=1.0,
        above=0,
    )
    rl_default_top_p: float = flag(
        "Sample from the likeliest tokens up to this probability; 0 and 1: from all.",
        default=0.0,
        at_least=0,
        at_most=1,
    )
    rl_default_top_k: int = flag("Sample from this many likeliest tokens; -1 and 0: from all.", default=-1, at_least=-1)
    rl_parallel_generation_tasks: int = flag(
        "Answers that a data-parallel rank generates at once; their keys and values are in memory.",
        default=256,
        at_least=1,
    )

    @property
    @override
    def is_chosen(self) -> bool:
        """Whether the run trains with GRPO."""
        return self.perform_rl_step

    @property
    @override
    def averages_answers(self) -> bool:
        """Answers or their tokens, by --grpo-loss-type."""
        return self.perform_rl_step

    @property
    @override
    def makes_samples(self) -> bool:
        """Samples are the model's answers."""
        return self.is_chosen

    @property
    def loss_name(self) -> str:
        """The loss's name in reports."""
        return self.grpo_loss_type

    @property
    def answers(self) -> int:
        """Answers that are made at a time."""
        return self.grpo_prompts_per_step * self.grpo_group_size

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the initial model."""
        return self.grpo_kl_beta > 0

    @property
    def rewards(self) -> RewardSettings:
        """What gives rewards, and its limits."""
        return RewardSettings(self.reward_function or "", self.reward_timeout, self.reward_memory_gb)

    @property
    def prompt_files(self) -> tuple[str, ...]:
        """Files with prompts."""
        return self.grpo_prompts

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Prompts at a time, answers to each, and how often each is learned from."""
        return self.grpo_prompts_per_step, self.grpo_group_size, self.grpo_iterations

    @property
    def most_tokens(self) -> int:
        """Most tokens of an answer."""
        return self.grpo_max_new_tokens

    @property
    def scaling(self) -> str:
        """What centered rewards are divided by."""
        return self.grpo_scale_rewards

    @property
    def sampling(self) -> tuple[float, float, int]:
        """Temperature, top-p and top-k of answers; 0 keeps all tokens."""
        return self.rl_default_temperature, self.rl_default_top_p, max(0, self.rl_default_top_k)

    @property
    def at_once(self) -> int:
        """Answers that a rank generates at once at most."""
        return min(self.rl_parallel_generation_tasks, self.answers)

    def steps(self, batch_size: int) -> int:
        """Optimizer steps on the answers that are made at a time."""
        return self.grpo_iterations * self.answers // batch_size

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about prompts, rewards, lengths and batches."""
        return (*super().rules(), *_RULES)

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """The loss, in the line about the model."""
        if not self.is_chosen:
            return ()
        return (f"trained on its own answers ({self.loss_name}, {self.grpo_group_size} to a prompt)",)


def _of(run: RunConfig) -> GRPOConfig:
    return run.part(GRPOConfig)


def _settings_need_the_switch(run: RunConfig) -> str | None:
    given = changed_flags(run, GRPOConfig)
    if _of(run).is_chosen or not given:
        return None
    return f"{given[0]} has no effect without --perform-rl-step; give that, too, or leave it out"


def _has_prompts_and_rewards(run: RunConfig) -> str | None:
    found = _of(run)
    if not found.is_chosen or run.data.mock_data:
        return None
    first = "--grpo-eval-prompts" if run.training.skip_train else "--grpo-prompts"
    prompts = found.grpo_eval_prompts if run.training.skip_train else found.grpo_prompts
    lacking = {f"{first} FILE.jsonl": prompts, "--reward-function FILE.py:NAME": found.reward_function}
    names = [name for name, value in lacking.items() if not value]
    with_flag = " with --skip-train" if run.training.skip_train else ""
    return f"--perform-rl-step{with_flag} needs {' and '.join(names)}" if names else None


def _reads_no_other_data(run: RunConfig) -> str | None:
    given = [flag for flag, value in _data_flags(run).items() if value]
    if not _of(run).is_chosen or not given:
        return None
    return f"{given[0]} has no effect with --perform-rl-step, which learns from answers to --grpo-prompts; leave it out"


def _data_flags(run: RunConfig) -> dict[str, object]:
    data = run.data
    documents = [each for each in data.given_document_flags() if each != "--packing"]
    return {
        "--data-path": data.data_path,
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
        "--data-args-path": data.data_args_path,
        "--per-split-data-args-path": data.per_split_data_args_path,
        **dict.fromkeys(documents, True),
        f"--packing {data.packing}": data.packing != "best-fit",
    }


def _correction_has_effect(run: RunConfig) -> str | None:
    found = _of(run)
    if not (found.is_chosen and found.grpo_use_bias_correction_kl) or found.has_reference:
        return None
    return "--grpo-use-bias-correction-kl has no effect with --grpo-kl-beta 0; leave it out, or give a beta"


def _is_whole_number_of_steps(run: RunConfig) -> str | None:
    found, size = _of(run), run.training.global_batch_size
    if not found.is_chosen or run.data.mock_data or found.answers % size == 0:
        return None
    return (
        f"--grpo-prompts-per-step {found.grpo_prompts_per_step} times --grpo-group-size {found.grpo_group_size} are "
        f"{found.answers} answers, which --global-batch-size {size} doesn't divide; give a divisor, such as "
        f"{max(each for each in range(1, size + 1) if found.answers % each == 0)}"
    )


def _there_is_room_for_answers(run: RunConfig) -> str | None:
    found, length = _of(run), run.data.seq_length
    if not found.is_chosen or found.grpo_max_new_tokens < length:
        return None
    return (
        f"--grpo-max-new-tokens {found.grpo_max_new_tokens} leaves no room for a prompt in --seq-length {length}; give "
        "less, or a larger --seq-length"
    )


def _starts_from_a_trained_model(run: RunConfig) -> str | None:
    checkpoint = run.checkpoint
    if not _of(run).is_chosen or checkpoint.load or checkpoint.pretrained_checkpoint or checkpoint.load_hf:
        return None
    return (
        "--perform-rl-step improves a trained model, and none is given: name it with --pretrained-checkpoint, "
        "--load-hf or --load"
    )


def _batches_have_one_size(run: RunConfig) -> str | None:
    if not _of(run).is_chosen:
        return None
    given = {
        "--rampup-batch-size": run.training.rampup_batch_size,
        "--step-batch-size-schedule": run.training.step_batch_size_schedule,
    }
    changing = [name for name, value in given.items() if value]
    return f"{changing[0]}: --perform-rl-step takes steps on equally many answers; leave it out" if changing else None


def _evaluation_is_whole(run: RunConfig) -> str | None:
    found = _of(run)
    if not found.is_chosen:
        return None
    if found.grpo_eval_temperature and not found.grpo_eval_prompts:
        temperature = f"--grpo-eval-temperature {found.grpo_eval_temperature:g}"
        return f"{temperature} has no effect without --grpo-eval-prompts; give these, too, or leave it out"
    if found.grpo_eval_prompts and run.training.eval_iters == 0:
        return "--eval-iters 0 turns evaluation off, and --grpo-eval-prompts asks for it; leave one of them out"
    return None


_RULES: tuple[Rule, ...] = (
    _evaluation_is_whole,
    _settings_need_the_switch,
    _has_prompts_and_rewards,
    _reads_no_other_data,
    _starts_from_a_trained_model,
    _there_is_room_for_answers,
    _batches_have_one_size,
    _correction_has_effect,
    _is_whole_number_of_steps,
    rule(
        "--attention-dropout {run.model.attention_dropout:g} and --hidden-dropout {run.model.hidden_dropout:g}: "
        "--perform-rl-step compares probabilities of one network, and dropout would change it with each step; leave "
        "them out",
        lambda run: _of(run).is_chosen and (run.model.attention_dropout or run.model.hidden_dropout),
    ),
    rule(
        "--diloco-workers: --perform-rl-step shares answers among all ranks of a run, and workers train apart; leave "
        "it out",
        lambda run: _of(run).is_chosen and run.parallel.diloco_workers is not None,
    ),
    rule(
        "--spike-action rollback: --perform-rl-step can't take back answers that the model has learned from; use "
        "--spike-action skip",
        lambda run: _of(run).is_chosen and run.guards.spike_action == "rollback",
    ),
    rule(
        "--mtp-num-layers {run.model.mtp_num_layers}: --perform-rl-step trains no prediction of further tokens; give "
        "--mtp-num-layers 0",
        lambda run: _of(run).is_chosen and run.model.mtp_num_layers,
    ),
    rule(
        "--z-loss-coeff {run.model.z_loss_coeff:g}: --perform-rl-step has no such term; leave it out",
        lambda run: _of(run).is_chosen and run.model.z_loss_coeff,
    ),
)
