"""Operations on tensors of one rank, with their gradients."""

from megatron.core.torch_release import require_torch

require_torch()
