"""Train a model of this project in Accelerate's loop, and save it for any layout.

``torchrun --standalone --nproc_per_node=2 train.py FOLDER OUT``: FOLDER is a Hugging Face model or a checkpoint. On
CPUs set ``ACCELERATE_USE_CPU=true``.
"""

import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import megatron


def main(folder: str, out: str) -> None:
    accelerator = Accelerator()
    model = megatron.load(folder, dtype="fp32", device=accelerator.device)
    model.train()
    vocabulary = model.config.vocab_size
    assert vocabulary is not None

    starts = torch.randint(vocabulary, (64, 1), generator=torch.Generator().manual_seed(0))
    texts = TensorDataset((starts + torch.arange(17)) % vocabulary)  # consecutive ids; real texts come from a tokenizer
    loader = DataLoader(texts, batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(2):
        for (ids,) in loader:
            logits = wrapped(ids[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), reduction="mean").item()
            accelerator.print(f"epoch {epoch} loss {mean:.6f}")

    accelerator.unwrap_model(wrapped).save(out)  # rank 0 writes
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
