"""Train a module of your own on data of your own: ``python train.py``, or ``torchrun --nproc_per_node=2 train.py``."""

import sys

import torch
from torch import Tensor, nn
from typing_extensions import override

import megatron
from megatron.errors import run_command


class Sines:  # sixteen values, and the one that follows
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        values = torch.sin(torch.arange(17) * 0.3 + number) + 0.05 * torch.randn(17)
        return {"past": values[:16], "future": values[16:]}


class Forecast(nn.Module):  # returns its loss
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(1, 32, batch_first=True), nn.Linear(32, 1)

    @override
    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(self.memory(past[..., None])[0][:, -1]), future)


def main() -> None:
    flags = "--micro-batch-size 16 --global-batch-size 64 --train-iters 200 --lr 0.01 --eval-iters 2 --log-interval 20"
    megatron.pretrain(Forecast(), [*flags.split(), *sys.argv[1:]], train_data=Sines(), valid_data=Sines())


if __name__ == "__main__":
    run_command(main)  # a user's mistake ends in one sentence, without a traceback
