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
    """A Llama of two layers with random weights, large enough that its words differ in probability."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    found: Any = LlamaForCausalLM(config)
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


PARTS = {"trl_kto.json": kto}


def main(names: list[str]) -> None:
    """Write the parts that are named, or all."""
    import trl

    for name in names or PARTS:
        content = {"trl": trl.__version__, **PARTS[name]()}
        (FOLDER / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
