"""What trl computes, written by ``python -m tests.golden.regenerate_trl`` where trl is installed (it is no dependency).

Each part runs one of trl's trainers on a small random model of transformers, and keeps what went into its loss with
what came out of it. trl and the datasets library may be in an environment of their own that sees this project's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "unit" / "objectives"
WORDS = 40


def tokenizer() -> Any:
    """Words w0, w1, … as ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    fast = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


def model(seed: int) -> Any:
    """A Llama of two layers whose weights follow from a formula, large enough that its words differ in probability."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    found: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for number, (name, weight) in enumerate(found.named_parameters()):
            waves = torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * (1.7 + 0.13 * number + seed) + number)
            weight.copy_(1 + 0.1 * waves.view_as(weight) if "norm" in name else 0.3 * waves.view_as(weight))
        found.lm_head.weight[1] *= 4  # some answers end early
    return found.eval()


def text(start: int, count: int) -> str:
    """Some words."""
    return " ".join(f"w{2 + (start + 7 * place) % (WORDS - 2)}" for place in range(count))


def kto() -> dict[str, Any]:
    """Losses of KTOTrainer on a batch of six answers."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    records = [
        {"prompt": text(3 * n, 2 + n % 3), "completion": " " + text(11 * n + 1, 1 + n), "label": n % 3 != 1}
        for n in range(6)
    ]
    found: dict[str, Any] = {"losses": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, loss, beta, good, bad, seeds in (
            ("kto 0.1 1 1", "kto", 0.1, 1.0, 1.0, (0, 1)),
            ("kto 0.5 1.5 0.7", "kto", 0.5, 1.5, 0.7, (0, 1)),
            ("kto 0.1 1 1 the other way round", "kto", 0.1, 1.0, 1.0, (1, 0)),
            ("apo_zero_unpaired 0.3 1 2", "apo_zero_unpaired", 0.3, 1.0, 2.0, (0, 1)),
        ):
            trained, initial = (model(seed) for seed in seeds)
            settings = KTOConfig(
                folder,
                loss_type=loss,
                beta=beta,
                desirable_weight=good,
                undesirable_weight=bad,
                per_device_train_batch_size=len(records),
                report_to=[],
                bf16=False,
                use_cpu=True,
                max_length=None,
                gradient_checkpointing=False,
            )
            trainer = KTOTrainer(
                trained,
                initial,
                args=settings,
                train_dataset=Dataset.from_list(records),
                processing_class=tokenizer(),
            )
            [batch] = trainer.get_train_dataloader()
            with torch.no_grad():
                value = trainer.compute_loss(trained, batch)
                scores = {
                    side: [None if each is None else each.tolist() for each in trainer.compute_ref_log_probs(of, batch)]
                    for side, of in (("trained", trained), ("initial", initial))
                }
            found["labels"] = batch["label"].tolist()
            metrics = {key: each[-1] for key, each in trainer._metrics["eval"].items() if len(each)}
            found["losses"][name] = {
                "loss": value.item(),
                "kl": metrics.get("kl"),
                "rewards": [metrics.get("rewards/chosen"), metrics.get("rewards/rejected")],
                **scores,
            }
    return found


def reward(answers: list[list[int]]) -> list[float]:
    """How many words of each answer have an even number, and a little for its length."""
    return [sum(word % 2 == 0 for word in ids) / 4 + 0.05 * len(ids) for ids in answers]


GRPO_SETTINGS: dict[str, Any] = {"beta": 0.05, "epsilon": 0.02, "temperature": 0.9, "learning_rate": 0.02}
"""SGD at a rate so high that the second step on the same answers has other ratios than 1."""


def grpo() -> dict[str, Any]:
    """Two steps of GRPOTrainer on the same answers, which its model gives: what the loss was, and the weights then."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    found: dict[str, Any] = {"runs": {}, "settings": GRPO_SETTINGS, "prompts": [text(3 * n, 2 + n) for n in range(2)]}
    for kind, corrected in (("grpo", True), ("dapo", False)):
        losses, inputs = [], list[Any]()

        class Recording(GRPOTrainer):  # type: ignore[misc]
            """Keeps each loss, and what the first one is of."""

            def _compute_loss(self, model: Any, given: Any) -> Any:
                value = super()._compute_loss(model, given)
                losses.append(value.item())  # noqa: B023
                inputs.append(given)  # noqa: B023
                return value

        with tempfile.TemporaryDirectory() as folder:
            settings = GRPOConfig(
                folder,
                loss_type=kind,
                num_generations=4,
                per_device_train_batch_size=8,
                num_iterations=2,
                max_steps=2,
                max_completion_length=8,
                optim="sgd",
                weight_decay=0.0,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                scale_rewards="group",
                use_bias_correction_kl=corrected,
                logging_steps=1,
                report_to=[],
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                save_strategy="no",
                model_init_kwargs={"dtype": "float32"},
                seed=3,
                **GRPO_SETTINGS,
            )
            model(0).save_pretrained(folder)
            trainer = Recording(
                folder,
                reward_funcs=lambda completion_ids, **_: reward(completion_ids),
                args=settings,
                train_dataset=Dataset.from_list([{"prompt": each} for each in found["prompts"]]),
                processing_class=tokenizer(),
            )
            trainer.train()
        given = inputs[0]
        rows = zip(given["prompt_ids"], given["prompt_mask"], given["completion_ids"], given["completion_mask"])
        found["runs"][kind] = {
            "answers": [[p[m > 0].tolist(), c[n > 0].tolist()] for p, m, c, n in rows],
            "losses": losses,
            "corrected": corrected,
            "logged": [each for each in trainer.state.log_history if "grad_norm" in each],
            "weights": {name: each.flatten()[:8].tolist() for name, each in trainer.model.named_parameters()},
        }
    return found


PARTS = {"trl_kto.json": kto, "trl_grpo_run.json": grpo}


def main(names: list[str]) -> None:
    """Write the parts that are named, or all."""
    import trl

    for name in names or PARTS:
        content = {"trl": trl.__version__, **PARTS[name]()}
        (FOLDER / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
