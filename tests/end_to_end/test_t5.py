"""pretrain_t5.py as a user runs it: from sentences to updated weights, on several ranks, stopped and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Metaspace, Sequence, Split
from tokenizers.processors import TemplateProcessing

from tests.end_to_end.commands import losses, run, tensors
from tests.end_to_end.sentences import WORDS, assert_two_halves_are_the_whole, make_sentences, preprocess
from tests.harness.sentences import check_line
from tests.tiers import tiers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a data set that tools/preprocess_data.py made of documents of short sentences."""
    return make_sentences(tmp_path_factory.mktemp("t5"), "--vocab-extra-ids 10")


TINY = (
    "--num-layers 2 --decoder-num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--decoder-seq-length 16 --position-embedding-type relative --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 "
    "--log-interval 1 --eval-iters 1 --num-workers 0 --train-iters 6 --vocab-extra-ids 10"
)


def test_every_weight_learns(data: str, tmp_path: Path) -> None:
    """Also the tables of positions and what cross-attention multiplies with, on two tensor-parallel ranks."""
    flags = f"{TINY} {data} --tensor-model-parallel-size 2 --sequence-parallel --save-interval 1 --exit-interval 2"
    log = run("pretrain_t5.py", flags, "--save", str(tmp_path), ranks=2)
    assert len(losses(log)) == 2
    kinds = (f"{kind}_attention: chunked" for kind in ("encoder self", "decoder self", "decoder cross"))
    assert re.search(f"attention +{' .*; '.join(kinds)}", log)
    one, two = (tensors(tmp_path / f"iter_000000{n}") for n in (1, 2))
    still = [name for name in one if name.startswith("model.") and torch.equal(one[name], two[name])]
    assert still == []
    assert {"model.encoder_positions.weight", "model.decoder_positions.weight"} <= one.keys()


@pytest.mark.parametrize(
    "layout",
    tiers(["--pipeline-model-parallel-size 2", "--use-distributed-optimizer"], first=[]),  # BERT's is in test_bert.py
)
def test_resume_is_bitwise(layout: str, data: str, tmp_path: Path) -> None:
    """A run that was stopped would go on with other samples, spans or dropout."""
    assert_two_halves_are_the_whole("pretrain_t5.py", f"{TINY} {data} {layout}", tmp_path)


def test_other_layouts_go_on_from_a_checkpoint(data: str, tmp_path: Path) -> None:
    """A T5 cut inside its decoder loads on one rank, and, with its sequences cut as well, on two."""
    still = f"{TINY} {data} --attention-dropout 0 --hidden-dropout 0"
    cut = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|ttL --save-interval 3"
    run("pretrain_t5.py", f"{still} {cut} --exit-interval 3", "--save", str(tmp_path), ranks=2)
    alone = losses(run("pretrain_t5.py", still, "--load", str(tmp_path)))
    sliced = f"{still} --context-parallel-size 2 --cp-comm-type all_gather"
    together = losses(run("pretrain_t5.py", sliced, "--load", str(tmp_path), ranks=2))
    assert list(alone) == list(together) == [4, 5, 6]
    for iteration, loss in alone.items():
        assert float(loss) == pytest.approx(float(together[iteration]), rel=1e-4)
    refused = run("pretrain_t5.py", f"{still} --decoder-num-layers 2", "--load", str(tmp_path), expect=2)
    check_line(refused, "--decoder-num-layers", "3", "2")


def test_flags_of_megatron_lm(data: str) -> None:
    """Its T5 scripts name the encoder's layers and length."""
    theirs = TINY.replace("--num-layers", "--encoder-num-layers", 1).replace("--seq-length", "--encoder-seq-length", 1)
    report = run("pretrain_t5.py", f"{theirs} {data} --dry-run --world-size 8 --pipeline-model-parallel-size 2")
    check_line(report, "--encoder-num-layers 2", "--num-layers 2")
    check_line(report, "stages", "2", "2", "3")
    check_line(report, "--encoder-seq-length 32", "--seq-length 32")


def test_a_published_t5_goes_on_training(tmp_path: Path) -> None:
    """Hugging Face's model and tokenizer: text becomes data, weights are converted, and training begins with both."""
    transformers = pytest.importorskip("transformers", reason="models to convert are made with it")
    pieces = ["<pad>", "</s>", "<unk>", *(f"\u2581{word}" for word in WORDS.split()), "."]
    pipeline = tokenizers.Tokenizer(WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>"))
    pipeline.normalizer = Lowercase()
    pipeline.pre_tokenizer = Sequence([Split(".", "isolated"), Metaspace()])
    pipeline.add_special_tokens([*pieces[:3], *(f"<extra_id_{number}>" for number in range(9, -1, -1))])
    pipeline.post_processor = TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pipeline, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(tmp_path / "hf")
    sizes = {"num_layers": 2, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "vocab_size": len(tokenizer)}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "hf")
    ours = tmp_path / "ours"
    run("tools/checkpoint/convert.py", f"--from hf --load {tmp_path}/hf --to megatron --save {ours}")
    made = preprocess(tmp_path, f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/hf")
    taken = "--use-checkpoint-args --finetune --seq-length 32 --micro-batch-size 2 --train-iters 2 --lr 1e-2"
    log = run("pretrain_t5.py", f"{made} --load {ours} {taken} --log-interval 1 --eval-iters 0 --num-workers 0")
    assert list(losses(log)) == [1, 2]
    assert "HuggingFaceTokenizer" in log
