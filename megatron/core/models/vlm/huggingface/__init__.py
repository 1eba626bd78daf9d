"""Published vision-language models, whose config.json has those of an encoder and of a language model inside."""

from __future__ import annotations

from megatron.core.models.vlm.huggingface.gemmas import GEMMA3, PALIGEMMA
from megatron.core.models.vlm.huggingface.internvl import INTERNVL
from megatron.core.models.vlm.huggingface.llava import LLAVA
from megatron.core.models.vlm.huggingface.llava_next import LLAVA_NEXT
from megatron.core.models.vlm.huggingface.nested import NestedFormat

FORMAT = NestedFormat(
    {"llava": LLAVA, "llava_next": LLAVA_NEXT, "internvl": INTERNVL, "paligemma": PALIGEMMA, "gemma3": GEMMA3}
)
